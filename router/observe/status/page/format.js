// Writes numbers as people read them: few digits, with units.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three digits or so: 0, 0.42, 7.3, 128, 1,240, 12.4k, 3.1M. */
export function number(value) {
  if (value === 0) return "0";
  if (value < 10) return String(Number(value.toPrecision(2)));
  if (value < 10_000) return whole.format(value);
  for (const [unit, size] of [["k", 1e3], ["M", 1e6], ["G", 1e9]]) {
    if (value < 1000 * size) return trimmed(value / size) + unit;
  }
  return trimmed(value / 1e12) + "T";
}

export const count = (value) => (value < 100_000 ? whole.format(value) : number(value));

export function seconds(value) {
  if (value < 0.0095) return `${Number((value * 1e3).toPrecision(2))} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 99.5) return `${value.toFixed(1)} s`;
  return span(value);
}

/** Long times: 95 s, 12 min, 3 h, 4 d. */
export function span(value) {
  for (const [unit, size, most] of [["s", 1, 100], ["min", 60, 100], ["h", 3600, 48]]) {
    if (value < most * size) return `${Math.round(value / size)} ${unit}`;
  }
  return `${Math.round(value / 86400)} d`;
}

export function bytes(value) {
  for (const [unit, size] of [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9]]) {
    if (value < 1000 * size) return `${trimmed(value / size)} ${unit}`;
  }
  return `${trimmed(value / 1e12)} TB`;
}

export function percent(part) {
  const value = 100 * part;
  return value > 0 && value < 9.95 ? `${value.toFixed(1)} %` : `${Math.round(value)} %`;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}

const trimmed = (value) => (value < 9.995 ? String(Number(value.toFixed(2))) : String(Number(value.toPrecision(3))));
