// Formulas are set by KaTeX, which lies beside this file: no network.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const text = place.textContent.trim()
    const block = text.startsWith("\\[")
    katex.render(text.slice(2, -2), place, { displayMode: block, throwOnError: false })
    if (block) {
      place.tabIndex = 0 // a wide formula scrolls, with the keyboard too
      place.setAttribute("role", "math")
      place.setAttribute("aria-label", "equation")
    }
  }
})
