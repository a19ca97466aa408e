/*
 * The TBHOOKS tab. TensorBoard calls `render` once, in an iframe of its own. This file connects the parts: it holds the state,
 * fetches data when a choice changes, polls running trainings, and passes the data to the parts of the page.
 */

import { api } from "./core/api.js";
import { createCompared } from "./detail/compared.js";
import { createControls } from "./core/controls.js";
import { createData } from "./core/data.js";
import { createDetail } from "./detail/panel.js";
import { createFindings } from "./core/findings.js";
import { createHeatmap } from "./map/heatmap.js";
import { createLegend, legendsOf } from "./map/legend.js";
import { pollForever } from "./core/polling.js";
import { createModel } from "./core/model.js";
import { cellLines, originWords } from "./map/panes.js";
import { chosen, kindWords, runNamed, statWords } from "./core/runs.js";
import { copyText, saveCsv, savePng } from "./map/save.js";
import { createShell } from "./core/shell.js";
import { initialState, MOST_PICKS, shareState } from "./core/state.js";
import { createStatus } from "./core/status.js";
import { followTheme, themeColours } from "./core/theme.js";
import { nodeKey, revealing } from "./map/tree.js";
import { domainOf, afterNewSteps, showing, zoomed } from "./map/view.js";

const sameSite = (one, other) => one[0] === other[0] && one[1] === other[1];

export function render() {
  const shell = createShell();
  const data = createData(api);
  const modelOf = createModel();
  const share = shareState(adopt);
  let state = share.read() ?? initialState();
  let list = null;
  let choice = null;
  let model = null;
  let jump = null;
  let adding = false;
  let detailed = "";

  const controls = createControls(shell.controls, {
    change,
    zoom,
    all: () => setRange(null),
    png: () => model && savePng({ ...pictured(), choice }),
    csv: () => model && saveCsv({ ...model, kind: choice.kind, stat: choice.stat, origin: originOf }),
    link: copyLink,
  });
  const finding = (mark) => goToFinding(mark.finding, mark.pane ? "b" : "a");
  const heatmap = createHeatmap(shell.maps, { view: setRange, pick, toggle, label, finding, describe });
  const legend = createLegend(shell.legend);
  const status = createStatus(shell);
  const findings = createFindings(shell.findings, goToFinding);
  const compared = createCompared(shell.compared, {
    remove: (site) => change({ picks: state.picks.filter((pair) => !sameSite(pair, [site.path, site.index])) }),
    adding: (on) => {
      adding = on;
      draw();
    },
    open: toggle,
  });
  const detail = createDetail(shell.detail, { api, onClose: () => change({ picks: [], step: null }), onPickStep: pickStep });

  const what = () => `${kindWords(choice.kind)} ${statWords(choice.stat)}`;
  const legends = () => legendsOf(model.panes, what());
  const title = () => [choice.vs ? `${choice.run} and ${choice.vs}` : choice.run, what()].join(" \u2013 ");
  const held = () => [data.held.a, data.held.b];
  const matrixOf = (pane) => held()[pane.id === "b" ? 1 : 0];
  const originOf = (pane, row) => (originWords(matrixOf(pane), row) ? "median" : "own");

  const pictured = () => ({ geometry: heatmap.geometry(), model, theme: themeColours(), title: title(), legends: legends() });

  async function copyLink() {
    const copied = await copyText(share.address(shown()));
    status.say(copied ? "link copied" : "copy the address of the page instead");
  }

  /** The state including defaults, so that a link shows the same view later. */
  function shown() {
    if (choice === null) return state;
    return { ...state, run: state.run || choice.run, kind: state.kind || choice.kind, stat: state.stat || choice.stat };
  }
  /** The choice to resolve: a run that starts meanwhile does not replace the shown one. */
  const request = () => ({ ...state, run: state.run || choice?.run || "" });
  const remember = () => share.write(shown());

  /** Applies a choice of the user. Only the affected data is fetched again. */
  function change(patch) {
    state = { ...state, ...patch };
    if ("search" in patch || "depth" in patch) heatmap.scrollToTop();
    remember();
    if (["run", "vs", "kind", "stat"].some((name) => name in patch)) choose();
    else draw();
  }

  /** Another address was entered, or the back button pressed. */
  function adopt(next) {
    if (next === null) {
      remember();
      return;
    }
    state = next;
    jump = cursorOfState();
    choose();
  }

  function cursorOfState() {
    const [pair] = state.picks;
    return pair && state.step !== null ? { site: { path: pair[0], index: pair[1] }, step: state.step, side: state.side } : null;
  }

  /** Resolves the choice against the existing runs, fetches the data, shows it. */
  async function choose() {
    if (list === null) return;
    const resolved = chosen(list, request());
    const next = resolved ?? (choice === null ? chosen(list, { ...state, run: "" }) : null);
    shell.empty.hidden = next !== null || choice !== null;
    shell.app.hidden = !shell.empty.hidden;
    if (next === null) return;
    const waiting = setTimeout(() => (shell.loading.hidden = false), 300);
    try {
      if (!(await data.load(next, list))) return;
      choice = next;
      status.problem(resolved ? null : `Run ${state.run} is not in the log directory; this is ${next.run}.`);
      draw();
    } catch (error) {
      status.problem(`${error.message}.`.replace(/\.\.$/, "."));
    } finally {
      clearTimeout(waiting);
      shell.loading.hidden = true;
    }
  }

  function groups() {
    const sides = [{ side: "a", run: choice.run, findings: data.held.findings.a }];
    return choice.vs ? [...sides, { side: "b", run: choice.vs, findings: data.held.findings.b }] : sides;
  }

  /** Renders the current data. */
  function draw() {
    if (choice === null || data.held.a === null) return;
    const theme = themeColours();
    const compose = () => modelOf({ state, choice, held: data.held, groups: groups(), dark: theme.dark });
    model = compose();
    if (jump !== null) {
      arrive(jump);
      model = compose();
    }
    heatmap.update(model);
    if (jump !== null) heatmap.goTo({ key: nodeKey(jump.site), pane: jump.side, step: jump.step });
    jump = null;
    legend.show(legends(), theme);
    const { log, depth, error } = model;
    controls.update({ list, state, choice, log, depth, error, deepest: model.tree.deepest, count: model.rows.length });
    findings.show(groups());
    shell.panel.hidden = shell.grip.hidden = state.panel === "closed";
    compared.show(model.chosen, adding);
    showDetail(theme.dark);
    status.show(list, choice, held(), model);
  }

  function showDetail(dark) {
    const nothing = model.chosen.length === 0 || state.step === null;
    shell.panel.classList.toggle("with-detail", !nothing);
    const run = state.side === "b" && choice.vs ? choice.vs : choice.run;
    const view = { run, kind: choice.kind, sites: model.chosen, step: state.step, dark };
    const wanted = nothing ? "" : JSON.stringify([view, held().map((matrix) => matrix?.steps.length)]);
    if (nothing) detail.clear();
    else if (wanted !== detailed) detail.show(view); // this queries the server again, so only if something changed
    detailed = wanted;
  }

  /** Opens the tree down to a module and moves the view to a step. */
  function arrive({ site, step }) {
    const toggled = [...revealing(model.tree.root, nodeKey(site), model.depth, new Set(state.toggled))];
    const range = showing(model.range, model.domain, step, model.least);
    state = { ...state, toggled, from: range ? range[0] : null, to: range ? range[1] : null };
    remember();
  }

  function goToFinding(finding, side) {
    const { site, step } = finding;
    if (site === null) {
      setRange(showing(model.range, model.domain, step, model.least));
      return;
    }
    jump = { site, step, side };
    const kind = choice.kinds.includes(site.kind) ? site.kind : choice.kind;
    const toggled = kind === choice.kind ? state.toggled : [];
    change({ kind, toggled, search: "", picks: [[site.path, site.index]], step, side });
  }

  function zoom(factor) {
    if (!model) return;
    const middle = (model.view[0] + model.view[1]) / 2;
    setRange(zoomed(model.range, model.domain, factor, middle, model.least));
  }

  function setRange(range) {
    state = { ...state, from: range ? range[0] : null, to: range ? range[1] : null };
    remember();
    if (!model) return;
    model = { ...model, range, view: range ?? model.domain };
    heatmap.update(model);
  }

  function pick(hit, add) {
    const row = model.rows[hit.row];
    const pane = model.panes[hit.pane];
    if (row.site === null) {
      compared.explain(row);
      change({ panel: "open" });
      return;
    }
    const pair = [row.site.path, row.site.index];
    const others = state.picks.filter((each) => !sameSite(each, pair));
    const removes = add && others.length < state.picks.length && state.picks.length > 1 && state.step === pane.steps[hit.index];
    const picks = add || adding ? (removes ? others : [...others.slice(0, MOST_PICKS - 1), pair]) : [pair];
    change({ picks, step: pane.steps[hit.index], side: pane.id === "b" ? "b" : "a", panel: "open" });
  }

  function pickStep(step) {
    const range = showing(model.range, model.domain, step, model.least);
    if (model.chosen.length) heatmap.goTo({ key: nodeKey(model.chosen[0]), pane: state.side, step });
    change({ step, from: range ? range[0] : null, to: range ? range[1] : null });
  }

  function toggle(row) {
    const toggled = state.toggled.filter((key) => key !== row.key);
    change({ toggled: toggled.length < state.toggled.length ? toggled : [...toggled, row.key] });
  }

  /** A name was clicked: a group opens or closes, a module shows its details at the selected step, or at the last one. */
  function label(hit, add) {
    const row = model.rows[hit.row];
    if (row.group) toggle(row);
    else if (model.panes[0].steps.length) {
      const { steps } = model.panes[0];
      const at = steps.indexOf(state.step);
      pick({ row: hit.row, pane: 0, index: at < 0 ? steps.length - 1 : at }, add);
    }
  }

  function describe(hit) {
    const messages = (marks) => marks.slice(0, 3).map((mark) => ({ text: mark.finding.message, tone: "finding" }));
    if (hit.area === "axis") return { title: `step ${hit.marks[0].step}`, lines: messages(hit.marks) };
    const row = model.rows[hit.row];
    if (hit.index < 0) {
      const missing = hit.area === "cell" && row.site && !model.panes[hit.pane].numbers(row);
      const text = missing ? "not in this run" : row.group && !row.open ? originWords(data.held.a, row) : "";
      return { title: row.full, lines: text ? [{ text, tone: "soft" }] : [] };
    }
    const lines = cellLines(model.panes, held(), row, hit, what());
    const step = model.panes[hit.pane].steps[hit.index];
    const near = model.marks.filter((mark) => mark.pane === hit.pane && mark.row === hit.row && mark.step === step);
    return { title: row.full, lines: [...lines, ...messages(near)] };
  }

  /** Fetches the list of runs, and new steps of the shown ones. */
  async function look() {
    try {
      list = await api.runs();
      status.answered();
      if (choice === null) await choose();
      else await follow();
      return true;
    } catch (error) {
      detailed = "";
      status.silent(error);
      return false;
    }
  }

  async function follow() {
    const gone = [choice.run, choice.vs].filter((name) => name && !runNamed(list, name));
    status.gone(gone);
    const before = domainOf(model?.panes ?? []);
    const changed = await data.follow(list);
    if (changed && model && state.from !== null) {
      const after = domainOf(held().filter(Boolean));
      const [from, to] = afterNewSteps([state.from, state.to], before, after);
      state = { ...state, from, to };
      remember();
    }
    const now = gone.length ? null : chosen(list, request());
    if (now && ["run", "vs", "kind", "stat"].some((name) => now[name] !== choice[name])) {
      await choose(); // data that was unavailable before may be available now
      return;
    }
    choice = now ?? choice;
    draw();
  }

  followTheme(draw);
  jump = cursorOfState();
  shell.ready.then(() => pollForever(look)());
}
