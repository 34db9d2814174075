// Makes elements and changes them in place: what is as it was is not touched, so scroll positions,
// focus and open details stay. Text is only ever text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function drawn(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function setText(target, text) {
  const wanted = String(text);
  if (target.textContent !== wanted) target.textContent = wanted;
}

export function setAttribute(target, name, value) {
  const wanted = String(value);
  if (target.getAttribute(name) !== wanted) target.setAttribute(name, wanted);
}

export function setClass(target, className) {
  if (target.className !== className) target.className = className;
}

/**
 * Keeps the children of `parent` in step with `items`, in their order: `make(item)` for one whose
 * key is new, `update(child, item)` for all. Children of other keys go.
 */
export function keep(parent, items, key, make, update) {
  const known = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = known.get(name);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = name;
    }
    known.delete(name);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/**
 * Fills a table. A column is {head, cell(item), number, less, fill(td, item)}; `fill` draws where text
 * is not enough, and `less` is left out where there is little room.
 */
export function table(target, columns, items, key) {
  keep(target.tHead.rows[0], columns, (column) => column.head, headCell, () => {});
  const make = () => {
    const row = element("tr");
    columns.forEach((column, i) => row.append(bodyCell(column, i)));
    return row;
  };
  keep(target.tBodies[0], items, key, make, (row, item) => {
    columns.forEach((column, i) => {
      const cell = row.cells[i];
      if (column.fill) column.fill(cell, item);
      else setText(cell, column.cell(item));
    });
  });
  target.hidden = items.length === 0;
}

const kind = (column) => [column.number && "number", column.less && "less"].filter(Boolean).join(" ");

function headCell(column) {
  const head = element("th", kind(column), column.head);
  head.scope = "col";
  if (column.about) head.title = column.about;
  return head;
}

function bodyCell(column, place) {
  const cell = element(place === 0 ? "th" : "td", kind(column));
  if (place === 0) cell.scope = "row";
  cell.dataset.label = column.head;
  return cell;
}

/** Fills a list of facts: [[name, text, className?], ...]. */
export function facts(target, pairs) {
  const make = ([name]) => element("div", "", element("dt", "", name), element("dd"));
  keep(target, pairs, ([name]) => name, make, (row, [, text, className = ""]) => {
    setText(row.lastElementChild, text);
    setClass(row.lastElementChild, className);
  });
}

/** Fills a fieldset with names, of which one is chosen: the first, until `onChange(name)`. */
export function choice(target, names, onChange) {
  names.forEach((name, i) => {
    const input = element("input");
    input.type = "radio";
    input.name = target.id;
    input.checked = i === 0;
    input.addEventListener("change", () => onChange(name));
    target.append(element("label", "", input, element("span", "", name)));
  });
}
