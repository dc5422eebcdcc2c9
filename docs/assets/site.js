// The overview of the zoo: a head sorts by its column, words filter the rows.
document.addEventListener("DOMContentLoaded", () => {
  const holder = document.querySelector(".zoo-table")
  const table = holder && holder.querySelector("table")
  if (!table) return
  const body = table.tBodies[0]
  const rows = [...body.rows]
  const units = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 }

  const value = (row, column) => {
    const text = row.cells[column].textContent.trim()
    const found = text.match(/^([\d.,]+)(?: (B|KiB|MiB|GiB))?$/)
    return found ? parseFloat(found[1].replaceAll(",", "")) * (units[found[2]] || 1) : text
  }
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1 // what was not measured comes last
    return a.localeCompare(b)
  }

  ;[...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button")
    button.type = "button"
    button.append(...head.childNodes)
    head.append(button)
    head.setAttribute("aria-sort", "none")
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending"
      for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none")
      head.setAttribute("aria-sort", down ? "descending" : "ascending")
      rows.sort((a, b) => compare(value(a, column), value(b, column)) * (down ? -1 : 1))
      body.append(...rows)
    })
  })

  const field = document.createElement("input")
  field.type = "search"
  field.placeholder = "Filter: elementwise, constant, linear_scan …"
  field.setAttribute("aria-label", "Filter the mixers")
  const count = document.createElement("p")
  count.setAttribute("role", "status")
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean)
    for (const row of rows) {
      const text = row.textContent.toLowerCase()
      row.hidden = !words.every((word) => text.includes(word))
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} mixers`
  }
  field.addEventListener("input", filter)
  holder.prepend(field, count)
  filter()
})

// Wide tables scroll by themselves; the keyboard must reach them. And the theme's search is a dialog without a name.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  const reach = () => {
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
    }
  }
  reach()
  setTimeout(reach, 500) // the theme wraps tables when it starts
  addEventListener("resize", reach)
})
