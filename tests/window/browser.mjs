// The story of the window in Chromium, over a real run of the demo: every page, a job followed from waiting to green without a
// reload, no script, 400 px, dark, keyboard, accessibility (WCAG 2.2 AA by axe-core), and a controller that goes away.
//
// MODULES: where playwright-core and axe-core are; PROGRAM: the controller; IMAGES: where pictures go. Ends with 0 if all is well.
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const { MODULES, PROGRAM, IMAGES } = process.env;
const require = createRequire(`${MODULES}/`);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const LIMIT = 60_000;

const until = async (what, ask, limit = LIMIT) => {
  const end = Date.now() + limit;
  for (;;) {
    const answer = await ask();
    if (answer) return answer;
    assert.ok(Date.now() < end, `not within ${limit} ms: ${what}`);
    await new Promise((done) => setTimeout(done, 50));
  }
};
const told = (what) => console.log(`ok ${what}`);

const browser = await chromium.launch({
  executablePath: "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});
// The browser is there before the jobs are, so that the first of them can be seen waiting.
const demo = spawn(PROGRAM, ["demo"], { stdio: ["ignore", "pipe", "inherit"] });
let ended = false;
demo.on("exit", () => (ended = true));
let printed = "";
demo.stdout.on("data", (text) => (printed += text));

const trouble = [];
// What a page does that it must not: errors, refused content, requests to anybody else.
const watch = (page, origin) => {
  page.on("console", (message) => message.type() === "error" && trouble.push(`${page.url()}: ${message.text()}`));
  page.on("pageerror", (error) => trouble.push(`${page.url()}: ${error}`));
  page.on("request", (request) => request.url().startsWith(origin) || trouble.push(`asks ${request.url()}`));
  return page;
};

try {
  const origin = await until("the demo tells its address", () => printed.match(/dashboard is at (http:\/\/[0-9.:]+)\//)?.[1]);
  // This page is open before the first job is, and is never loaded again: it keeps what it shows of each job.
  const context = await browser.newContext({ viewport: { width: 1100, height: 900 }, colorScheme: "light" });
  const overview = watch(await context.newPage(), origin);
  await overview.goto(origin);
  await overview.evaluate(() => {
    window.seen = {};
    const look = () => {
      for (const row of document.querySelectorAll("#tables tbody tr")) {
        const task = row.querySelector("a").pathname, state = row.querySelector(".state").innerText.replace(/^\W+/, "");
        const states = (window.seen[task] ??= []);
        if (states.at(-1) !== state) states.push(state);
      }
    };
    new MutationObserver(look).observe(document.getElementById("tables"), { childList: true, subtree: true });
    look();
  });
  const api = async (path) => (await fetch(`${origin}/api/v1/${path}`)).json();

  // A job followed from waiting to green.
  const queued = await until("a job waits", async () =>
    (await api("jobs?phase=queued&backend=pod")).jobs.filter((job) => job.job_key === "matrix").at(0));
  const page = watch(await context.newPage(), origin);
  await page.goto(`${origin}/jobs/${queued.task}`);
  await page.evaluate(() => (window.notReloaded = true));
  const first = await page.locator("main .sentence").innerText();
  await overview.waitForSelector(".slot.running");
  await overview.screenshot({ path: `${IMAGES}/overview.png` });
  const seen = new Set([first.split(":")[0].trim()]);
  await until("the job is green on the open page", async () => {
    seen.add((await page.locator("main .sentence").innerText()).split(":")[0].trim());
    return [...seen].some((words) => words.includes("success"));
  });
  assert.equal(await page.evaluate(() => window.notReloaded), true, "the page was never reloaded");
  told(`a job's own page without a reload: ${[...seen].join(" → ")}`);
  const followed = await until("a job went from waiting to green on the overview", async () =>
    Object.entries(await overview.evaluate(() => window.seen)).find(([, states]) => states[0] === "waiting" && states.at(-1) === "success"));
  told(`${followed[0]} followed on the overview without a reload: ${followed[1].join(" → ")}`);
  await until("its timeline is whole", async () => (await page.locator("tr.unreached").count()) === 0);
  await page.screenshot({ path: `${IMAGES}/job.png`, fullPage: true });
  await until("all jobs are over", () => printed.includes("reached their right end"));
  assert.match(printed, /10 of 10 jobs reached their right end/);

  // Every page: no outside request, no refused content, light and dark, wide and narrow, accessible, small.
  const failed = (await api("jobs?phase=finished")).jobs.find((job) => job.backend === "refused");
  const paths = { overview: "/", jobs: "/jobs", filtered: "/jobs?phase=finished&backend=pod", job: `/jobs/${queued.task}`,
    refused: `/jobs/${failed.task}`, reconcilers: "/reconcilers", nothing: "/jobs/999999" };
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: { width: 1100, height: 900 }, colorScheme, reducedMotion: "reduce" });
    for (const [name, path] of Object.entries(paths)) {
      const page = await context.newPage();
      if (name !== "nothing") watch(page, origin);
      let bytes = 0;
      page.on("response", async (answer) => answer.url().includes("/live") || (bytes += (await answer.body().catch(() => "")).length));
      await page.goto(origin + path);
      assert.equal(await page.locator("h1").count(), 1, `${name} has one h1`);
      await page.evaluate(axe);
      const found = await page.evaluate(() => axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] }));
      const faults = found.violations.map((v) => `${v.id}: ${v.help}: ${v.nodes.map((n) => n.html).slice(0, 3).join(" | ")}`);
      assert.deepEqual(faults, [], `${name}, ${colorScheme}: accessibility`);
      assert.ok(found.passes.length > 10, "axe looked at the page");
      await page.setViewportSize({ width: 400, height: 800 });
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(wide <= 400, `${name} is ${wide} px wide at 400 px`);
      if (name === "overview") await page.screenshot({ path: `${IMAGES}/phone-${colorScheme}.png` });
      await page.setViewportSize({ width: 1100, height: 900 });
      if (colorScheme === "dark" && ["jobs", "reconcilers", "overview"].includes(name)) {
        await page.screenshot({ path: `${IMAGES}/${name}-dark.png` });
      }
      assert.ok(bytes > 0 && bytes <= 100_000, `${name} weighs ${bytes} bytes`);
      await page.close();
    }
    await context.close();
  }
  told("every page, light and dark: WCAG 2.2 AA by axe-core, nothing sideways at 400 px, at most 100 kB");

  // Keyboard alone: the skip link comes first, focus can be seen, a link is followed by Enter.
  await overview.goto(`${origin}/jobs`);
  await overview.keyboard.press("Tab");
  const skip = overview.locator(":focus");
  assert.equal(await skip.innerText(), "Skip to the content");
  assert.ok((await skip.boundingBox()).x >= 0, "the focused skip link is on the screen");
  for (let n = 0; n < 30; n++) {
    await overview.keyboard.press("Tab");
    if ((await overview.locator(":focus").getAttribute("href"))?.startsWith("/jobs/")) break;
  }
  const outline = await overview.locator(":focus").evaluate((e) => getComputedStyle(e).outlineStyle);
  assert.notEqual(outline, "none", "the focused link can be seen");
  await overview.keyboard.press("Enter");
  await overview.waitForURL(/\/jobs\/[0-9]+$/);
  told("keyboard: skip link, visible focus, a job opened");

  // Without scripts everything is there, too.
  const plain = await browser.newContext({ javaScriptEnabled: false, viewport: { width: 1100, height: 900 } });
  const still = watch(await plain.newPage(), origin);
  for (const path of Object.values(paths).slice(0, 6)) {
    await still.goto(origin + path);
    assert.ok((await still.locator("main").innerText()).length > 40, `${path} is whole without scripts`);
  }
  await still.goto(`${origin}/jobs`);
  await still.selectOption("select[name=phase]", "finished");
  await still.selectOption("select[name=backend]", "vm");
  await still.click("button");
  assert.match(still.url(), /phase=finished&backend=vm/);
  assert.equal(await still.locator("tbody tr").count(), 1, "the one vm job of the demo");
  await still.click("tbody a");
  assert.match(await still.locator("main").innerText(), /Timeline/);
  told("without scripts: every page, the filters, a job");

  assert.deepEqual(trouble, [], "no error, no refused content, no outside request");
  told("no outside request and nothing that the content policy refuses");

  // The controller goes away: the open page says so itself.
  await page.goto(origin);
  await page.waitForSelector("#age time");
  demo.kill("SIGTERM");
  await until("the demo ends", () => ended, 20_000);
  await page.locator("#broken").waitFor({ state: "visible", timeout: 20_000 });
  told("a page whose controller went away says that it is old");
  console.log("told to its end");
} finally {
  if (!ended) demo.kill("SIGTERM");
  await browser.close();
  await until("the demo ends", () => ended, 20_000);
}
