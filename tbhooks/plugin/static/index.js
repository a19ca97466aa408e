/*
 * The TBHOOKS tab. TensorBoard calls `render` once, in an iframe of its own. This file connects the parts: it holds the state,
 * fetches data when a choice changes, polls running trainings, and passes the data to the parts of the page.
 */

import { firstQuestions } from "./core/ahead.js";
import { api, forgetAhead } from "./core/api.js";
import { attachShortcuts, createHelp } from "./core/help.js";
import { createCompared } from "./detail/compared.js";
import { createControls } from "./core/controls.js";
import { createData } from "./core/data.js";
import { createDescribe } from "./map/describe.js";
import { createDetail } from "./detail/panel.js";
import { createFindings } from "./core/findings.js";
import { createHeatmap } from "./map/heatmap.js";
import { createLegend, legendsOf } from "./map/legend.js";
import { createModel } from "./core/model.js";
import { createOverview } from "./overview/page.js";
import { addStyle, createShell } from "./core/shell.js";
import { createStatus } from "./core/status.js";
import { originWords } from "./map/panes.js";
import { pollForever } from "./core/polling.js";
import { chosen, kindWords, runNamed, statWords } from "./core/runs.js";
import { copyText, saveCsv, savePng } from "./map/save.js";
import { initialState, MOST_PICKS, pageOf, shareState, SIDES } from "./core/state.js";
import { followTheme, themeColours } from "./core/theme.js";
import { nodeKey, revealing } from "./map/tree.js";
import { afterNewSteps, around, domainOf, showing, zoomed } from "./map/view.js";

const sameSite = (one, other) => one[0] === other[0] && one[1] === other[1];

export async function render() {
  const styled = addStyle();
  let adopted = (next) => (state = next ?? state); // until the page is there
  const share = shareState((next) => adopted(next));
  let state = share.read() ?? initialState();
  const first = await firstQuestions(state);
  const shell = createShell();
  const data = createData(api);
  const modelOf = createModel();
  const help = createHelp();
  let list = null;
  let choice = null;
  let model = null;
  let jump = null;
  let adding = false;
  let detailed = "";
  let loads = 0;

  const controls = createControls(shell.controls, {
    change,
    zoom,
    all: () => setRange(null),
    png: () => model && savePng({ ...pictured(), choice }),
    csv: () => model && saveCsv({ ...model, kind: choice.kind, stat: choice.stat, origin: originOf }),
    link: copyLink,
    help: help.open,
  });
  const finding = (mark) => goToFinding(mark.finding, SIDES[model.panes[mark.pane].of]);
  const describe = createDescribe({ model: () => model, matrices, what, shows: () => state.shows });
  const heatmap = createHeatmap(shell.maps, { view: setRange, pick, rest, toggle, label, finding, describe });
  const legend = createLegend(shell.legend);
  const status = createStatus(shell);
  const findings = createFindings(shell.findings, {
    pick: goToFinding,
    zoom: (one, side) => goToFinding(one, side, true),
    mute: (rule) => change({ muted: [...new Set([...state.muted, rule])] }),
    unmute: (rule) => change({ muted: state.muted.filter((each) => each !== rule) }),
  });
  const overview = createOverview(shell.overview, {
    api,
    on: {
      open: (run) => change({ page: "map", run, vs: "", more: [], picks: [], step: null }),
      unusual: (run) => change({ page: "map", run, vs: "", more: [], sort: "unusual" }),
      finding: openFinding,
      compare: ([run, vs, ...more]) => change({ page: "map", run, vs, more, picks: [], step: null, panel: "closed" }),
    },
  });
  const compared = createCompared(shell.compared, {
    remove: (site) => change({ picks: state.picks.filter((pair) => !sameSite(pair, [site.path, site.index])) }),
    adding: (on) => {
      adding = on;
      draw();
    },
    open: toggle,
  });
  const detail = createDetail(shell.detail, { api, onClose: closeDetail, onPickStep: pickStep });

  function matrices() {
    return data.sides().map(({ matrix }) => matrix);
  }
  function what() {
    return `${kindWords(choice.kind)} ${statWords(choice.stat)}`;
  }
  const legends = () => legendsOf(model.panes, what());
  const isRatio = () => choice.stat === "ratio";
  const title = () => [choice.runs.join(" and "), what()].join(" \u2013 ");
  const originOf = (pane, row) => (originWords(matrices()[pane.of], row, state.shows) ? state.shows : "own");
  const pictured = () => ({ geometry: heatmap.geometry(), model, theme: themeColours(), title: title(), legends: legends(), ratio: isRatio() });

  async function copyLink() {
    const copied = await copyText(share.address(shown()));
    status.say(copied ? "link copied" : "copy the address of the page instead");
  }

  /** The state including defaults, so that a link shows the same view later. */
  function shown() {
    if (choice === null || pageOf(state) === "overview") return state;
    return { ...state, run: state.run || choice.run, kind: state.kind || choice.kind, stat: state.stat || choice.stat };
  }
  /** The choice to resolve: a run that starts meanwhile does not replace the shown one. */
  const request = () => ({ ...state, run: state.run || choice?.run || "" });
  const remember = () => share.write(shown());

  /** Applies a choice of the user. Only the affected data is fetched again. */
  function change(patch) {
    const turned = "page" in patch && patch.page !== pageOf(state);
    state = { ...state, ...patch };
    if ("search" in patch || "depth" in patch || "sort" in patch || "group" in patch) heatmap.scrollToTop();
    if ("run" in patch || "kind" in patch) heatmap.hideTip();
    remember();
    if (turned) turnTo();
    else if (["run", "vs", "more", "kind", "stat"].some((name) => name in patch)) choose();
    else draw();
  }

  /** Shows the page of the state. */
  function turnTo() {
    const page = pageOf(state);
    shell.overview.hidden = page !== "overview";
    shell.work.hidden = shell.skip.hidden = page === "overview";
    controls.page(page);
    heatmap.hideTip();
    if (page === "map") choose();
    else showOverview();
  }

  function showOverview() {
    if (list === null) return;
    shell.empty.hidden = list.runs.length > 0;
    shell.app.hidden = !shell.empty.hidden;
    if (list.runs.length && pageOf(state) === "overview") overview.show(list, state.muted);
  }

  /** Another address was entered, or the back button pressed. */
  function adopt(next) {
    if (next === null) {
      remember();
      return;
    }
    state = next;
    jump = cursorOfState();
    turnTo();
  }

  function cursorOfState() {
    const [pair] = state.picks;
    return pair && state.step !== null ? { site: { path: pair[0], index: pair[1] }, step: state.step, side: state.side } : null;
  }

  /** Resolves the choice against the existing runs, fetches the data, shows it. */
  async function choose() {
    if (list === null || pageOf(state) !== "map") return;
    const resolved = chosen(list, request());
    const next = resolved ?? (choice === null ? chosen(list, { ...state, run: "" }) : null);
    shell.empty.hidden = next !== null || choice !== null;
    shell.app.hidden = !shell.empty.hidden;
    if (next === null) return;
    const waiting = setTimeout(() => (shell.loading.hidden = false), 300);
    loads++;
    try {
      if (!(await data.load(next, list))) return;
      choice = next;
      status.problem(resolved ? null : `Run ${state.run} is not in the log directory; this is ${next.run}.`);
      remember();
      draw();
    } catch (error) {
      status.problem(`${error.message}.`.replace(/\.\.$/, "."));
    } finally {
      loads--;
      clearTimeout(waiting);
      shell.loading.hidden = true;
    }
  }

  const isHeard = ({ rule }) => !state.muted.includes(rule);
  const sides = () => data.sides().map((side) => ({ ...side, findings: side.findings.filter(isHeard) }));
  const hiddenCount = () => data.sides().reduce((sum, side) => sum + side.findings.filter((each) => !isHeard(each)).length, 0);

  /** Renders the current data. */
  function draw() {
    if (pageOf(state) === "overview") return showOverview();
    if (choice === null || data.sides().length === 0) return;
    const theme = themeColours();
    const heard = sides();
    const compose = () => modelOf({ state, choice, sides: heard, dark: theme.dark });
    model = compose();
    if (jump !== null) {
      arrive(jump);
      model = compose();
    }
    arrange();
    showDetail(theme.dark); // the server answers while the map is drawn
    heatmap.update(model);
    if (jump !== null) heatmap.goTo({ key: nodeKey(jump.site), pane: jump.side, step: jump.step });
    jump = null;
    legend.show(legends(), theme, isRatio());
    const { log, depth, error, strip, tree } = model;
    const [tags, lines] = [strip?.tags ?? data.sides()[0].scalars.map(({ tag }) => tag), strip?.lines.map(({ tag }) => tag) ?? []];
    controls.update({ list, state, choice, log, depth, error, deepest: tree.deepest, count: model.rows.length, byRole: tree.byRole, tags, lines });
    findings.show(heard.map((side, i) => ({ side: SIDES[i], run: side.matrix.run, findings: side.findings })), state.muted, hiddenCount());
    compared.show(model.chosen, adding);
    status.show(list, choice, matrices(), model);
  }

  /** Few rows leave room: the panel then goes below the map, which gets the whole width. */
  function arrange() {
    shell.panel.hidden = shell.grip.hidden = state.panel === "closed";
    const room = shell.work.clientHeight - 70;
    const below = state.panel === "open" && room > 520 && heatmap.wantedFor(model) < 0.45 * room;
    shell.work.classList.toggle("panel-below", below);
    shell.work.style.setProperty("--map-height", `${Math.ceil(heatmap.wantedFor(model)) + 74}px`);
  }

  function showDetail(dark) {
    const nothing = model.chosen.length === 0 || state.step === null;
    shell.panel.classList.toggle("with-detail", !nothing);
    const run = choice.runs[SIDES.indexOf(state.side)] ?? choice.run;
    const others = choice.runs.filter((name) => name !== run);
    const view = { run, others, kind: choice.kind, sites: model.chosen, step: state.step, dark };
    const wanted = nothing ? "" : JSON.stringify([view, matrices().map((matrix) => matrix.steps.length)]);
    if (nothing) detail.clear();
    else if (wanted !== detailed) detail.show(view); // this queries the server again, so only if something changed
    detailed = wanted;
  }

  function closeDetail() {
    change({ picks: [], step: null });
  }

  /** Opens the tree down to a module and moves the view to a step. */
  function arrive({ site, step, zoom: close }) {
    const toggled = [...revealing(model.tree.root, nodeKey(site), model.depth, new Set(state.toggled))];
    const range = close ? around(step, model.domain, model.least) : showing(model.range, model.domain, step, model.least);
    state = { ...state, toggled, from: range ? range[0] : null, to: range ? range[1] : null };
    remember();
  }

  /** From the overview to the map of a run, at the onset of an issue. */
  function openFinding(run, issue) {
    if (issue.site === null) return change({ page: "map", run, vs: "", more: [] });
    const { path, kind, index } = issue.site;
    jump = { site: issue.site, step: issue.onset, side: "a" };
    return change({ page: "map", run, vs: "", more: [], kind, stat: "", toggled: [], search: "", sort: "order", picks: [[path, index]], step: issue.onset, side: "a", panel: "open" });
  }

  function goToFinding(one, side, close = false) {
    const { site, onset: step } = one;
    if (site === null) {
      setRange(close ? around(step, model.domain, model.least) : showing(model.range, model.domain, step, model.least));
      return;
    }
    jump = { site, step, side, zoom: close };
    const kind = choice.kinds.includes(site.kind) ? site.kind : choice.kind;
    const toggled = kind === choice.kind ? state.toggled : [];
    change({ kind, toggled, search: "", sort: "order", picks: [[site.path, site.index]], step, side });
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
      compared.explain(row, state.shows);
      change({ panel: "open" });
      return;
    }
    const pair = [row.site.path, row.site.index];
    const others = state.picks.filter((each) => !sameSite(each, pair));
    const removes = add && others.length < state.picks.length && state.picks.length > 1 && state.step === pane.steps[hit.index];
    const picks = add || adding ? (removes ? others : [...others.slice(0, MOST_PICKS - 1), pair]) : [pair];
    change({ picks, step: pane.steps[hit.index], side: SIDES[pane.of], panel: "open" });
  }

  /** Somebody looks at a cell and may click it: the slowest of the answers that its details need is asked for. */
  function rest({ row, pane }) {
    const site = model?.rows[row]?.site;
    const run = choice.runs[model?.panes[pane]?.of];
    if (site && run) detail.prepare({ run, kind: choice.kind, path: site.path, index: site.index });
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

  /** Fetches the list of runs, and new steps of the shown ones. */
  async function look() {
    try {
      const isFirst = list === null;
      const answer = first.list ?? api.runs();
      first.list = null;
      list = await answer;
      status.answered();
      if (isFirst || pageOf(state) === "overview") turnTo();
      else if (choice === null) await choose();
      else await follow();
      return true;
    } catch (error) {
      detailed = "";
      status.silent(error);
      return false;
    } finally {
      forgetAhead();
    }
  }

  async function follow() {
    const gone = choice.runs.filter((name) => !runNamed(list, name));
    status.gone(gone);
    const before = domainOf(model?.panes ?? []);
    const changed = await data.follow(list);
    if (changed && model && state.from !== null) {
      const after = domainOf(matrices());
      const [from, to] = afterNewSteps([state.from, state.to], before, after);
      state = { ...state, from, to };
      remember();
    }
    if (loads > 0) return; // what was chosen meanwhile is drawn when it is here
    const now = gone.length ? null : chosen(list, request());
    if (now && (["run", "kind", "stat"].some((name) => now[name] !== choice[name]) || now.runs.join("\u0000") !== choice.runs.join("\u0000"))) {
      await choose(); // data that was unavailable before may be available now
      return;
    }
    choice = now ?? choice;
    draw();
  }

  attachShortcuts({
    "/": () => pageOf(state) === "map" && controls.focusSearch(),
    "?": help.open,
    o: () => change({ page: "overview" }),
    m: () => change({ page: "map" }),
    u: () => change({ page: "map", sort: state.sort === "unusual" ? "order" : "unusual" }),
    Escape: () => !help.isOpen() && state.picks.length && closeDetail(),
  });
  shell.skip.addEventListener("click", (event) => {
    event.preventDefault();
    heatmap.focus();
  });
  new ResizeObserver(() => model && choice && pageOf(state) === "map" && arrange()).observe(shell.work);
  followTheme(draw);
  adopted = adopt;
  jump = cursorOfState();
  controls.page(pageOf(state));
  styled.then(() => pollForever(look)());
}
