/* Shows the documentation of the rules, at the rule of the address. */

import { elementsOf } from "./markdown.js";
import { html } from "../core/elements.js";

const page = document.getElementById("page");
const MISSING = "The documentation of the rules is not part of this installation. `tbhooks rules` prints what each rule checks.";

const answer = await fetch(new URL("../rules.md", import.meta.url)).catch(() => null);
const text = answer?.ok ? await answer.text() : "";
page.replaceChildren(...(text ? elementsOf(text) : [html("p", { class: "missing" }, MISSING)]));
const wanted = decodeURIComponent(location.hash.slice(1));
if (wanted && document.getElementById(wanted)) location.replace(`#${wanted}`);
else if (wanted && text) page.prepend(html("p", { class: "missing" }, `There is no section about ${wanted}: it is a rule of your own.`));
