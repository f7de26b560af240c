// node browser.cjs PAGE report|site: prints as JSON what a person who points, clicks and searches sees.
const puppeteer = require("puppeteer-core")
const [, , page, what] = process.argv

const seen = {
  async report(tab) {
    const points = await tab.$$(".plot i")
    await points[1].hover()
    const value = await points[1].evaluate((each) => getComputedStyle(each, "::after").content)
    const column = () => tab.$$eval("table tr td:first-child", (cells) => cells.map((each) => each.innerText))
    const orders = [await column()]
    for (let click = 0; click < 2; click++) {
      await (await tab.$("th")).click()
      orders.push(await column())
    }
    return { value, orders }
  },
  async site(tab) {
    await tab.keyboard.press("/")
    await new Promise((resolve) => setTimeout(resolve, 1000))
    await tab.keyboard.type("fedprox")
    await new Promise((resolve) => setTimeout(resolve, 5000))
    return { text: await tab.evaluate(() => document.body.innerText) }
  },
}

async function main() {
  const browser = await puppeteer.launch({
    args: ["--no-sandbox", "--disable-gpu"], executablePath: process.env.JAXPFL_CHROMIUM, headless: "shell",
  })
  const tab = await browser.newPage(), asked = [], errors = []
  tab.on("request", (each) => { if (/^(http|ws)/.test(each.url())) asked.push(each.url()) })
  tab.on("pageerror", (error) => errors.push(String(error)))
  await tab.goto(`file://${page}`, { waitUntil: "load" })
  console.log(JSON.stringify({ ...(await seen[what](tab)), asked, errors }))
  await browser.close()
}

main()
