// Folds parts of the page on a phone, where they would be screens long; at a desk all are open.

export const narrow = window.matchMedia("(max-width: 700px)");

function fold() {
  for (const part of document.querySelectorAll("details.fold")) {
    part.open = !narrow.matches;
    part.firstElementChild.tabIndex = narrow.matches ? 0 : -1;
  }
}

narrow.addEventListener("change", fold);
fold();
