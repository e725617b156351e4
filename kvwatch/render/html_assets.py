"""Style and script of the report page, in the page itself: it must work where nothing else can be fetched."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #16191d; --soft: #565d66; --line: #dfe3e8; --code: #eef0f3;
  --critical: #b3261e; --critical-paper: #fdecea; --warning: #8a5300; --warning-paper: #fff4df;
  --unknown: #475569; --unknown-paper: #eceff4; --ok: #1b6e36; --ok-paper: #e7f5ea; --link: #0b57d0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #101317; --card: #181c21; --ink: #e8eaed; --soft: #a2abb6; --line: #2c323a; --code: #232830;
    --critical: #ff8f85; --critical-paper: #3a1614; --warning: #ffc26b; --warning-paper: #33240b;
    --unknown: #b6c2d1; --unknown-paper: #232a33; --ok: #7fd698; --ok-paper: #12291a; --link: #8ab4f8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
header, main, footer { max-width: 62rem; margin: 0 auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: .15rem 0 .4rem; }
h2 { font-size: 1.1rem; margin: 0; }
h3 { font-size: .8rem; letter-spacing: .05em; text-transform: uppercase; color: var(--soft); margin: 1.2rem 0 .4rem; }
p { margin: .3rem 0; }
a { color: var(--link); }
code { font: .92em/1.4 ui-monospace, monospace; background: var(--code); border-radius: 4px; padding: .1em .35em; }
.soft { color: var(--soft); font-size: .88rem; }
.verdict { margin-top: 1rem; padding: 1rem; border-radius: 10px; border-left: 8px solid; }
.verdict .word { font-weight: 800; letter-spacing: .06em; }
.verdict .now { font-weight: 650; font-size: 1.05rem; }
.critical.verdict { background: var(--critical-paper); border-color: var(--critical); }
.warning.verdict { background: var(--warning-paper); border-color: var(--warning); }
.unknown.verdict { background: var(--unknown-paper); border-color: var(--unknown); }
.ok.verdict { background: var(--ok-paper); border-color: var(--ok); }
.critical .word, .word.critical { color: var(--critical); }
.warning .word, .word.warning { color: var(--warning); }
.unknown .word, .word.unknown { color: var(--unknown); }
.ok .word, .word.ok { color: var(--ok); }
.word { font-weight: 700; }
.lost { margin-top: 1rem; padding: .8rem 1rem; border-radius: 10px; background: var(--critical); color: var(--card);
  font-weight: 700; }
body.is-old main, body.is-lost main, body.is-lost .verdict { opacity: .45; }
.engine { margin: 1rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.vitals { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.4rem, 1fr)); gap: .5rem; margin: .8rem 0 0;
  padding: 0; }
.vitals div { border: 1px solid var(--line); border-radius: 8px; padding: .4rem .6rem; min-width: 0; }
.vitals dt { color: var(--soft); font-size: .78rem; }
.vitals dd { margin: 0; font-size: 1.15rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.vitals svg { display: block; width: 100%; height: 6px; margin-top: .25rem; border-radius: 3px;
  background: var(--line); }
.vitals rect { fill: var(--soft); }
.vitals .full rect { fill: var(--critical); }
ul { list-style: none; margin: 0; padding: 0; }
.finding, .change { padding: .6rem 0; border-top: 1px solid var(--line); }
.finding:first-child, .change:first-child { border-top: 0; padding-top: 0; }
.change .setting { font-weight: 650; }
details p { font-size: .92rem; }
summary { cursor: pointer; color: var(--soft); font-size: .88rem; min-height: 1.7rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
td, th { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.fleet th, .fleet .number, .fleet .word { white-space: nowrap; }
.scroll { overflow-x: auto; }
.scroll th, .scroll td { white-space: nowrap; }
.rest { margin-top: .8rem; }
footer { padding-top: 1rem; padding-bottom: 2rem; }
@media (max-width: 30rem) {
  header, main, footer { padding: 0 .6rem; }
  .verdict, .engine { padding: .8rem; }
  .vitals { grid-template-columns: repeat(3, 1fr); }
  .vitals dd { font-size: 1rem; }
  .fleet td, .fleet th { padding-right: .35rem; font-size: .84rem; }
}
"""

# Fetches the page anew, keeps what the reader has opened, and says so when the agent no longer answers.
SCRIPT = """
(() => {
  const body = document.body, every = 1000 * Number(body.dataset.interval);
  let failedSince = null;
  const lost = (text) => {
    const bar = document.querySelector(".lost");
    bar.hidden = !text;
    bar.textContent = text;
    body.classList.toggle("is-lost", Boolean(text));
  };
  const refresh = async () => {
    try {
      const answer = await fetch(location.href, {cache: "no-store", signal: AbortSignal.timeout(4000)});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details[open]")].map((entry) => entry.id);
      document.title = next.title;
      document.querySelector("link[rel=icon]").href = next.querySelector("link[rel=icon]").href;
      body.className = next.body.className;
      document.querySelector("header").replaceWith(next.querySelector("header"));
      document.querySelector("main").replaceWith(next.querySelector("main"));
      for (const id of open) { const entry = document.getElementById(id); if (entry) entry.open = true; }
      failedSince = null;
    } catch {
      failedSince = failedSince || new Date().toLocaleTimeString();
      lost("kvwatch has not answered since " + failedSince + ". What stands below is old.");
    }
    setTimeout(refresh, every);
  };
  setTimeout(refresh, every);
})();
"""
