// Look at a built site in Chromium: every page at desktop and phone width, light and dark.
//
//   npm install puppeteer-core axe-core
//   NODE_PATH=node_modules CHROMIUM=/usr/bin/chromium node scripts/pages/look.cjs SITE [FOLDER for screenshots [pages to look at, a pattern]]
//
// Printed and counted: what is wider than the page, formulas that KaTeX refused, errors of scripts, requests to a network, and faults
// that axe calls serious or critical.

const fs = require("fs")
const path = require("path")
const { pathToFileURL } = require("url")
const puppeteer = require("puppeteer-core")

const [site, shots, pattern = "."] = process.argv.slice(2)
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8")
const views = [["desktop", 1280, "light"], ["desktop", 1280, "dark"], ["phone", 390, "light"], ["phone", 390, "dark"]]

const pagesIn = (folder) =>
  fs.readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const full = path.join(folder, entry.name)
    return entry.isDirectory() ? pagesIn(full) : entry.name.endsWith(".html") && entry.name !== "404.html" ? [full] : []
  })

const looked = () => {
  const width = document.documentElement.clientWidth
  const wide = []
  if (document.documentElement.scrollWidth > width) {
    for (const element of document.querySelectorAll("article *")) {
      if (element.getBoundingClientRect().right > width + 1 && !element.closest(".md-typeset__scrollwrap, pre, .arithmatex")) {
        wide.push(`${element.tagName}.${element.className.baseVal ?? element.className}`)
      }
    }
    wide.push(`page ${document.documentElement.scrollWidth} > ${width}`)
  }
  const formulas = document.querySelectorAll(".arithmatex").length
  return { wide: wide.slice(0, 4), formulas, set: document.querySelectorAll(".arithmatex .katex-html").length,
           refused: document.querySelectorAll(".katex-error").length }
}

const main = async () => {
  const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ["--no-sandbox"] })
  let faults = 0
  const say = (...words) => { faults += 1; console.log(...words) }
  const pages = pagesIn(path.resolve(site)).filter((file) => new RegExp(pattern).test(path.relative(site, file)))
  for (const [name, width, scheme] of views) {
    const context = await browser.createBrowserContext() // the theme remembers a palette
    const page = await context.newPage()
    await page.setViewport({ width, height: 900 })
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }])
    let where = ""
    page.on("request", (request) => { if (request.url().startsWith("http")) say(where, "asks", request.url()) })
    page.on("pageerror", (error) => say(where, "error", error.message))
    for (const file of pages) {
      where = `${path.relative(site, file)} ${name} ${scheme}:`
      await page.goto(pathToFileURL(file).href)
      await new Promise((done) => setTimeout(done, 150))
      const found = await page.evaluate(looked)
      if (found.wide.length) say(where, "overflows", found.wide.join(", "))
      if (found.refused || found.set !== found.formulas) say(where, `formulas: ${found.formulas}, set ${found.set}, refused ${found.refused}`)
      await page.evaluate(axe)
      const report = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }))
      for (const fault of report.violations.filter((v) => v.impact === "serious" || v.impact === "critical")) {
        say(where, fault.impact, fault.id, fault.nodes.slice(0, 3).map((n) => n.target.join(" ")).join(" | "), `(${fault.nodes.length})`)
      }
      if (shots) {
        fs.mkdirSync(shots, { recursive: true })
        const label = path.relative(site, file).replaceAll("/", "-").replace(".html", "")
        await page.screenshot({ path: path.join(shots, `${label}-${name}-${scheme}.png`), fullPage: true })
      }
    }
    await context.close()
  }
  await browser.close()
  console.log(`${pages.length} pages in ${views.length} views, ${faults} faults`)
  process.exitCode = faults ? 1 : 0
}

main()
