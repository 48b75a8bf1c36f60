// Everything that a model or a server says becomes text (textContent), never markup. The token is a variable of this
// script: it goes with the page.

const POLL_MS = 1000, MOST_BARS = 10;
const $ = (id) => document.getElementById(id);
const page = {token: null, models: [], strokes: [], asking: false, before: null, cards: new Map()};

function make(tag, {text, cls, ...attributes} = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Leaves what is the same alone, so that a selection or a screen reader's place is not lost every second.
function say(element, text, cls) {
  if (element.textContent !== text) element.textContent = text;
  if (cls !== undefined && element.className !== cls) element.className = cls;
}

const milliseconds = (ms) => ms === null ? "–" : ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(1)} ms`;
const count = (n) => n.toLocaleString("en-GB");

function size(bytes) {
  for (const unit of ["B", "KB", "MB"]) {
    if (bytes < 1000) return unit === "B" ? `${bytes} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(2)} GB`;
}

function since(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

class Refused extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

async function call(path, body) {
  const headers = {};
  if (page.token) headers.Authorization = `Bearer ${page.token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response, found;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, cache: "no-store", redirect: "error",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    found = await response.json();
  } catch {
    throw new Refused("away", "the node does not answer");
  }
  if (response.status === 401) askForToken();
  const kind = response.status === 401 ? "token" : found.kind ?? "failed";
  if (!response.ok) throw new Refused(kind, found.error ?? `HTTP ${response.status}`);
  return found;
}

function askForToken() {
  $("token-error").textContent = page.token ? "That token was not taken." : "";
  page.token = null;
  if ($("token-form").hidden) {
    $("token-form").hidden = false;
    $("token").focus();
  }
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.token = $("token").value.trim();
  $("token-error").textContent = "";
  $("token").value = "";
  $("token-form").hidden = true;
  poll();
});

// --- what the node is doing

let timer = 0, polling = false;

async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  try {
    showStatus(await call("/page/status"));
  } catch (error) {
    say($("node-state"), error.kind === "token" ? "locked" : "away", "bad");
    say($("node-detail"), error.kind === "token" ? "wants a token" : error.message);
  }
  polling = false;
  if ($("token-form").hidden) timer = setTimeout(poll, POLL_MS);
}

document.addEventListener("visibilitychange", poll);

function showStatus(found) {
  page.models = found.models;
  const ready = found.models.filter((model) => model.status);
  const total = (name) => ready.reduce((sum, model) => sum + model.status[name], 0);
  say($("node-state"), found.ready ? "ready" : "not ready", found.ready ? "good" : "bad");
  say($("node-detail"), found.ready ? "takes queries" : "a model is not ready");
  say($("uptime"), since(found.uptime_s));
  say($("models-ready"), `${ready.length} of ${found.models.length}`);
  say($("running"), `${count(total("running_queries"))} running`);
  say($("queued"), `${count(total("queued_queries"))} wait`);
  chooseModel(ready);
  const names = new Set(found.models.map((model) => model.name));
  for (const [name, card] of page.cards) {
    if (!names.has(name)) {
      card.root.remove();
      page.cards.delete(name);
    }
  }
  found.models.forEach(showModel);
}

function chooseModel(ready) {
  const select = $("model"), names = ready.map((model) => model.name), known = [...select.options].map((o) => o.value);
  if (select.disabled || names.join("\n") !== known.join("\n")) {
    const chosen = select.disabled ? null : select.value;
    select.replaceChildren(...names.map((name) => make("option", {text: name, value: name})));
    select.disabled = !names.length;
    if (!names.length) select.append(make("option", {text: "none is ready"}));
    if (names.includes(chosen)) select.value = chosen;
    showForm();
  }
  const model = ready.find((m) => m.name === select.value);
  say($("latency"), milliseconds(model ? model.status.median_ms : null));
  say($("latency-detail"), model ? `95 % within ${milliseconds(model.status.p95_ms)}` : "\u00a0");
  allowAsking();
}

function showModel(model) {
  let card = page.cards.get(model.name);
  if (!card) {
    card = makeCard(model.name);
    page.cards.set(model.name, card);
    $("models").append(card.root);
  }
  const now = model.status, promise = model.card;
  say(card.state, ` – ${model.state.toLowerCase()}${model.reason ? `: ${model.reason}` : ""}`, now ? "good" : "bad");
  card.body.hidden = !now;
  if (!now) return;
  say(card.facts, promise ? [promise.dataset, promise.architecture,
    promise.accuracy === null ? null : `accuracy ${(100 * promise.accuracy).toFixed(2)} %`,
    promise.train_records === null ? null : `${count(promise.train_records)} training records`,
  ].filter(Boolean).join(", ") : "no card: nothing is known of its training");
  say(card.epsilon, promise && promise.epsilon !== null ? promise.epsilon.toFixed(3) : "none");
  say(card.delta, promise && promise.epsilon !== null ? `delta ${promise.delta}` : "no differential privacy");
  card.line.hidden = !promise;
  say(card.line, promise ? `Training records: ${promise.line}` : "");
  say(card.pool, now.pool_size ? `${now.pool_ready} of ${now.pool_size}` : "none");
  say(card.poolNote, now.pool_size ? "queries ready" : "standard mode");
  say(card.queue, count(now.queued_queries));
  say(card.queueNote, `${count(now.queued_samples)} samples, ${count(now.running_queries)} running`);
  const days = now.hints_days_left;
  say(card.hints, days === null ? "–" : days < 0 ? "overdue" : `${Math.floor(days)} days`,
    days !== null && days < 0 ? "bad" : "");
  say(card.hintsNote, days === null ? "not used" : "until they are renewed");
  showServers(card, now.servers);
  showLatencies(card, now);
}

function makeCard(name) {
  const card = {};
  const tile = (title, figure, note) => {
    card[figure] = make("b");
    card[note] = make("span");
    return make("div", {cls: "tile"}, make("span", {text: title}), card[figure], card[note]);
  };
  card.state = make("span");
  card.facts = make("p", {cls: "note"});
  card.line = make("p", {cls: "note"});
  card.chart = draw("svg", {class: "latencies", viewBox: "0 0 256 100", preserveAspectRatio: "none", role: "img"});
  card.chartLegend = make("p", {cls: "legend"});
  card.servers = make("tbody");
  card.body = make("div", {},
    card.facts,
    make("div", {cls: "tiles"},
      tile("epsilon", "epsilon", "delta"), tile("pool", "pool", "poolNote"),
      tile("queue", "queue", "queueNote"), tile("hints", "hints", "hintsNote")),
    card.line,
    make("div", {cls: "columns"},
      make("div", {}, make("h4", {text: "Latency of the last queries"}), card.chart, card.chartLegend),
      make("div", {}, make("h4", {text: "Untrusted servers"}), make("table", {},
        make("thead", {}, make("tr", {}, ...["server", "conduct", "forgeries"].map(
          (text) => make("th", {text, scope: "col"})))), card.servers))));
  card.root = make("article", {cls: "panel model"}, make("h3", {}, make("span", {text: name}), card.state), card.body);
  card.root.querySelector("h3 span").style.fontWeight = "700";
  return card;
}

function showServers(card, servers) {
  const text = JSON.stringify(servers);
  if (card.serversText === text) return;
  card.serversText = text;
  card.servers.replaceChildren(...servers.map((server) => make("tr", {},
    make("td", {text: server.name}),
    make("td", {text: server.conduct, cls: server.conduct === "healthy" ? "good" : "bad"}),
    make("td", {text: count(server.forgeries), cls: server.forgeries ? "bad" : ""}))));
}

function showLatencies(card, now) {
  const text = now.latencies_ms.join();
  if (card.latenciesText === text) return;
  card.latenciesText = text;
  const most = Math.max(...now.latencies_ms, 1e-9) * 1.08, step = 256 / Math.max(1, now.latencies_ms.length - 1);
  const height = (ms) => (100 - 100 * ms / most).toFixed(2);
  const level = (ms, cls) => draw("line", {x1: 0, x2: 256, y1: height(ms), y2: height(ms), class: cls});
  card.chart.replaceChildren();
  if (now.latencies_ms.length) {
    const points = now.latencies_ms.map((ms, i) => `${(i * step).toFixed(2)},${height(ms)}`).join(" ");
    card.chart.append(draw("polyline", {points}), level(now.median_ms, "median"), level(now.p95_ms, "p95"));
  }
  const [median, p95] = [`median ${milliseconds(now.median_ms)}`, `95 % within ${milliseconds(now.p95_ms)}`];
  const words = now.latencies_ms.length ? `${now.latencies_ms.length} queries, ${median}, ${p95}` : "no query yet";
  card.chart.setAttribute("aria-label", words);
  card.chartLegend.replaceChildren(...now.latencies_ms.length ? [
    key("median", median), key("p95", p95), `axis from 0 to ${milliseconds(most)}`,
  ] : ["no query yet"]);
}

const key = (cls, text) => make("span", {cls: "key"}, make("i", {cls}), document.createTextNode(text));

// --- what is asked

const chosen = () => page.models.find((model) => model.status && model.name === $("model").value);

function showForm() {
  const model = chosen();
  $("draw").hidden = Boolean(model) && !model.drawn;
  $("file").hidden = !model || model.drawn;
  $("clear").hidden = $("draw").hidden;
  if (model) {
    say($("expected"), `Input${model.inputs.length > 1 ? "s" : ""}: ` + model.inputs.map(
      (input) => `${input.name}, ${input.dtype}, shape (${input.shape.join(", ")})`).join("; "));
    $("npy").disabled = model.inputs.length !== 1;
  }
}

function allowAsking() {
  const model = chosen();
  $("run").disabled = !model || page.asking || (model.drawn && !page.strokes.length);
}

$("model").addEventListener("change", () => {
  $("npy").value = "";
  showForm();
  allowAsking();
});

const pad = $("pad");
let stroke = null;

function showDrawing() {
  const context = pad.getContext("2d");
  context.clearRect(0, 0, pad.width, pad.height);
  context.strokeStyle = "#fff";
  context.lineWidth = pad.width / 12;
  traceStrokes(context, page.strokes, ([x, y]) => [x * pad.width, y * pad.height]);
  showPixels($("small"), renderDigit(page.strokes)?.map((x) => 255 * x) ?? [], SIDE);
  allowAsking();
}

function pointOf(event) {
  const box = pad.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

pad.addEventListener("pointerdown", (event) => {
  if (!event.isPrimary || event.button) return;
  event.preventDefault();
  pad.setPointerCapture(event.pointerId);
  stroke = [pointOf(event)];
  page.strokes.push(stroke);
  showDrawing();
});
pad.addEventListener("pointermove", (event) => {
  if (!stroke || !event.isPrimary) return;
  const moved = event.getCoalescedEvents?.() ?? [];
  stroke.push(...(moved.length ? moved : [event]).map(pointOf));
  showDrawing();
});
for (const name of ["pointerup", "pointercancel"]) pad.addEventListener(name, () => { stroke = null; });

$("clear").addEventListener("click", () => {
  page.strokes = [];
  showDrawing();
});

DIGITS.forEach((strokes, digit) => {
  const button = make("button", {text: String(digit), type: "button", "aria-label": `Draw a sample ${digit}`});
  button.addEventListener("click", () => {
    page.strokes = structuredClone(strokes);
    showDrawing();
  });
  $("samples").append(button);
});

async function dataFor(model) {
  if (model.drawn) return renderDigit(page.strokes);
  const [file] = $("npy").files;
  if (!file) return "random";
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return {npy: btoa(text)};
}

const ADVICE = {
  busy: "The node is busy. Try again in a moment.", late: "There was no result in time. Try again.",
  model: "The model is not loaded.", server: "The untrusted server is away.", away: "The node is away.",
  integrity: "A dishonest answer was refused.", data: "The model can't use these values.",
  input: "The query does not fit the model.", token: "A token is needed.", failed: "The query failed.",
};

$("run").addEventListener("click", async () => {
  const model = chosen();
  if (!model || page.asking) return;
  page.asking = true;
  allowAsking();
  say($("said"), "Asking ...", "");
  try {
    const data = await dataFor(model);
    const found = await call("/page/infer", {model: model.name, data});
    showAnswer(model, data, found);
  } catch (error) {
    const advice = error instanceof Refused ? ADVICE[error.kind] ?? "The query was refused." : "The page failed.";
    say($("said"), `${advice} ${error.message}`, "bad");
  }
  page.asking = false;
  allowAsking();
});

// --- the answer, and who saw what

function showPixels(canvas, levels, width) {
  const height = Math.max(1, Math.ceil(levels.length / width));
  canvas.width = width;
  canvas.height = levels.length ? height : width;
  const context = canvas.getContext("2d", {willReadFrequently: true});
  canvas.classList.toggle("blank", !levels.length);
  if (!levels.length) return;
  const picture = context.createImageData(width, height);
  levels.forEach((level, i) => picture.data.set([level, level, level, 255], 4 * i));
  context.putImageData(picture, 0, 0);
}

function showHistogram(element, counts) {
  const most = Math.max(...counts, 1);
  element.replaceChildren(...counts.map((n) => {
    const bar = make("i", {title: count(n)});
    bar.style.height = `${100 * n / most}%`;
    return bar;
  }));
  element.setAttribute("aria-label", `Histogram: ${counts.join(", ")}`);
}

function showAnswer(model, data, found) {
  const output = found.outputs[0];
  const best = output.shares ? output.shares.indexOf(Math.max(...output.shares)) : null;
  const result = best === null ? output.values.slice(0, 4).map((x) => String(+Number(x).toPrecision(5))).join(", ")
    : output.labels[best];
  say($("said"), `Result: ${result}, in ${milliseconds(found.times_ms.total)}, ${found.rounds} rounds in ` +
    `${found.mode} mode, ${size(found.bytes_up)} up, ${size(found.bytes_down)} down.`, "");
  showBars(output, best);
  showTimes(found.times_ms);
  const drawn = Array.isArray(data);
  showPixels($("node-picture"), drawn ? data.map((x) => 255 * x) : [], SIDE);
  say($("node-caption"), drawn ? "the drawing" : `${count(found.node.values)} values`);
  say($("node-answer"), result, result.length > 2 ? "long" : "");
  showHistogram($("node-histogram"), found.node.histogram);
  showServerSide(model, data, found.server);
}

function showBars(output, best) {
  const order = (output.shares ?? []).map((_, i) => i);
  if (order.length > MOST_BARS) order.sort((a, b) => output.shares[b] - output.shares[a]);
  $("bars").replaceChildren(...order.slice(0, MOST_BARS).map((i) => {
    const bar = make("i"), share = `${(100 * output.shares[i]).toFixed(1)} %`;
    bar.style.width = `${100 * output.shares[i]}%`;
    return make("li", {cls: i === best ? "top" : ""}, make("span", {text: output.labels[i]}),
      make("span", {}, bar), make("span", {text: share}));
  }));
  say($("shares-note"), !output.shares ? "\u00a0" : output.shares_are === "probabilities"
    ? "Probabilities, as the model gives them." : "Softmax of the model's outputs, computed for this chart.");
}

function showTimes(times) {
  const parts = [["node", "node"], ["server", "server"], ["wire", "wire"], ["waiting", "waiting and the rest"]];
  const total = parts.reduce((sum, [name]) => sum + times[name], 0) || 1;
  $("times").replaceChildren(...parts.map(([name]) => {
    const bar = make("i", {cls: name});
    bar.style.width = `${100 * times[name] / total}%`;
    return bar;
  }));
  $("times-legend").replaceChildren(...parts.map(([name, text]) => key(name, `${text} ${milliseconds(times[name])}`)),
    total > 1.01 * times.total ? "(more than the whole: blocks of one round travel at the same time)" : "");
  $("times").setAttribute("aria-label", parts.map(([name]) => `${name} ${milliseconds(times[name])}`).join(", "));
}

function showServerSide(model, data, view) {
  if (!view) {
    showPixels($("server-picture"), [], SIDE);
    $("server-histogram").replaceChildren();
    say($("server-caption"), "nothing");
    say($("upload"), "This model sent nothing to a server.");
    return;
  }
  const levels = Array.from(atob(view.picture), (letter) => letter.charCodeAt(0));
  const asked = `${model.name} ${JSON.stringify(data)}`, before = page.before;
  showPixels($("server-picture"), levels, view.width);
  say($("server-caption"), "this query");
  showHistogram($("server-histogram"), view.histogram);
  const part = view.shown < view.values ? `, of which the picture has ${count(view.shown)}` : "";
  say($("upload"), `Block ${view.block}'s upload: ${count(view.values)} numbers of ${view.bits} bits in ` +
    `${count(view.bytes)} bytes${part}. Grey is the upper 8 bits of each.`);
  if (before) {
    showPixels($("before-picture"), before.levels, before.width);
    say($("before-caption"), "the query before");
    const comparable = before.levels.length === levels.length;
    const equal = levels.filter((level, i) => level === before.levels[i]).length;
    const what = before.asked === asked && data !== "random" ? "The same query again: other noise." : "Another query.";
    say($("again"), !comparable ? what : `${what} ${count(equal)} of ${count(levels.length)} pixels are equal; ` +
      "by chance one in 256 is.");
  }
  page.before = {levels, asked, width: view.width};
}

for (const id of ["node-picture", "server-picture", "before-picture"]) showPixels($(id), [], SIDE);
showDrawing();
say($("footer"), "This page keeps nothing: no cookies, no storage, nothing from other sites.");
poll();
