"use strict";

const TYPING_PAUSE = 250; // milliseconds
const find = (id) => document.getElementById(id);
const panels = find("panels");
const maxSentences = Number(document.body.dataset.maxSentences);
const isClassifier = "isClassifier" in document.body.dataset; // it reads no sentences
const maxBytes = Number(document.body.dataset.maxBytes);

let image = null; // {file, token, width, height, picture}
let range = null; // [lowest, highest] cosine of all sentences
let threshold = null; // cosine; null colours everything
let drawing = false;
let drawAgain = false;
let opening = 0;

class Refused extends Error {}
class Forgotten extends Refused {}

async function post(path, body) {
  let response;
  try {
    response = await fetch(path, { method: "POST", body });
  } catch {
    throw new Refused("The server does not answer. Start it again in the terminal, then press Enter in a sentence.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const message = answer.error ?? "The server failed; its terminal says why. Try another image.";
  throw response.status === 410 ? new Forgotten(message) : new Refused(message);
}

function say(message) {
  find("message").textContent = message;
  find("message").hidden = !message;
}

// A refusal becomes a message; anything else is a bug and reaches the console.
async function attempt(action, subject = "") {
  document.body.classList.add("busy");
  try {
    return await action();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    say(subject ? `${subject}: ${error.message}` : error.message);
  } finally {
    document.body.classList.remove("busy");
  }
}

// Image

async function send(file) {
  if (file.size > maxBytes) throw new Refused(`The file is larger than ${maxBytes / 2 ** 20} MiB. Choose one radiograph.`);
  return (await post("image", file)).json();
}

async function openImage(file, name) {
  const turn = ++opening;
  const answer = await attempt(() => send(file), name);
  if (!answer) return;
  if (turn !== opening) return forget(answer.image); // another image was chosen meanwhile
  if (image) forget(image.token);
  image = { file, token: answer.image, ratio: answer.width / answer.height, picture: answer.picture };
  say("");
  find("notes").textContent = `Warning: ${answer.notes}.`;
  find("notes").hidden = !answer.notes;
  showScores(answer.scores);
  for (const panel of panels.children) showGrey(panel);
  draw();
}

function forget(token) {
  navigator.sendBeacon("forget", token);
}

// Sends the image again if the server has forgotten it meanwhile.
async function ask(path, question) {
  const current = image;
  const body = () => JSON.stringify({ image: current.token, ...question });
  try {
    return await post(path, body());
  } catch (error) {
    if (!(error instanceof Forgotten)) throw error;
    current.token = (await send(current.file)).image;
    return post(path, body());
  }
}

function showScores(scores) {
  const longest = Math.max(0.25, ...scores.map(({ score }) => Math.abs(score)));
  const rows = scores.map(({ finding, score, probability, threshold }) => {
    const row = document.createElement("tr");
    row.innerHTML = '<th scope="row"></th><td><div class="track"><i></i></div></td><td class="value"></td>';
    row.querySelector("th").textContent = finding;
    const bar = row.querySelector("i");
    if (probability !== null) {
      row.querySelector(".value").textContent = `${Math.round(100 * probability)} %`;
      row.querySelector(".track").classList.add("probability");
      row.classList.toggle("positive", probability >= threshold);
      bar.classList.toggle("negative", probability < threshold);
      bar.style.width = `${100 * probability}%`;
      const mark = document.createElement("b");
      mark.style.left = `${100 * threshold}%`;
      mark.title = `threshold ${Math.round(100 * threshold)} %`;
      row.querySelector(".track").append(mark);
      return row;
    }
    row.querySelector(".value").textContent = signed(score);
    const half = (50 * Math.abs(score)) / longest;
    bar.classList.toggle("negative", score < 0);
    bar.style.width = `${half}%`;
    bar.style.left = `${score < 0 ? 50 - half : 50}%`;
    return row;
  });
  const isCalibrated = (place) => scores[place].probability !== null;
  find("scores").querySelector(".calibrated")?.replaceChildren(...rows.filter((_, place) => isCalibrated(place)));
  const others = rows.filter((_, place) => !isCalibrated(place));
  find("scores").querySelector(".uncalibrated tbody").replaceChildren(...others);
  find("scores").querySelector(".uncalibrated").hidden = !others.length;
  find("scores").hidden = false;
}

// Sentences

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
const cosine = (value) => (Math.round(100 * value) / 100 || 0).toFixed(2).replace("-", "−"); // not -0.00
const sentenceOf = (panel) => panel.querySelector("textarea").value.trim();

function addPanel() {
  const panel = find("panel").content.cloneNode(true).firstElementChild;
  const input = panel.querySelector("textarea");
  let pause;
  input.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(draw, TYPING_PAUSE);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    clearTimeout(pause);
    draw();
  });
  panel.querySelector(".remove").addEventListener("click", () => {
    panel.remove();
    countPanels();
    draw();
  });
  const frame = panel.querySelector(".frame");
  frame.addEventListener("pointerdown", () => frame.classList.add("bare"));
  for (const end of ["pointerup", "pointerleave", "pointercancel"]) frame.addEventListener(end, () => frame.classList.remove("bare"));
  panels.append(panel);
  countPanels();
  if (image) showGrey(panel);
  return panel;
}

function countPanels() {
  panels.dataset.count = panels.children.length;
  find("add").disabled = panels.children.length >= maxSentences;
}

function showGrey(panel) {
  const grey = panel.querySelector(".grey");
  panel.querySelector(".frame").style.setProperty("--ratio", image.ratio);
  grey.src = image.picture;
  grey.hidden = false;
  panel.querySelector(".empty").hidden = true;
  showMap(panel, { error: "" });
}

function showMap(panel, map) {
  const colours = panel.querySelector(".colours");
  const caption = panel.querySelector("figcaption");
  const isDrawn = "picture" in map;
  colours.hidden = !isDrawn;
  if (isDrawn) colours.src = map.picture;
  caption.textContent = isDrawn ? `${map.note}Cosine from ${cosine(map.low)} to ${cosine(map.high)}` : map.error;
  caption.classList.toggle("error", !isDrawn && sentenceOf(panel) !== "");
}

// One request at a time; what changes meanwhile is drawn after it.
async function draw() {
  if (!image || isClassifier) return;
  if (drawing) {
    drawAgain = true;
    return;
  }
  drawing = true;
  try {
    await attempt(async () => {
      do {
        drawAgain = false;
        await drawOnce();
      } while (drawAgain);
      say("");
    });
  } finally {
    drawing = false;
  }
}

async function drawOnce() {
  const asked = image;
  const shown = [...panels.children];
  const answer = await (await ask("maps", { sentences: shown.map(sentenceOf), threshold })).json();
  if (asked !== image) {
    drawAgain = true;
    return;
  }
  shown.forEach((panel, place) => showMap(panel, answer.maps[place]));
  showRange("low" in answer ? [answer.low, answer.high] : null);
  find("save").disabled = answer.maps.every((map) => "error" in map);
}

// Controls

function showRange(found) {
  range = found;
  find("threshold").disabled = !range;
  find("ticks").replaceChildren();
  if (range) {
    for (let step = 0; step <= 4; step++) {
      const tick = document.createElement("span");
      tick.textContent = cosine(range[0] + (step / 4) * (range[1] - range[0]));
      tick.style.left = `${25 * step}%`;
      find("ticks").append(tick);
    }
  }
  // The cosine stays where the range moves.
  const share = range && threshold !== null ? (threshold - range[0]) / (range[1] - range[0] || 1) : 0;
  const place = 100 * Math.min(1, Math.max(0, share));
  if (document.activeElement !== find("threshold")) find("threshold").value = place;
  find("dimmed").style.width = `${place}%`;
  find("threshold-value").textContent = threshold === null ? "off" : cosine(threshold);
}

find("threshold").addEventListener("input", (event) => {
  const place = Number(event.target.value);
  threshold = place > 0 ? range[0] + (place / 100) * (range[1] - range[0]) : null;
  showRange(range);
  draw();
});

function showOpacity() {
  const share = Number(find("opacity").value);
  panels.style.setProperty("--opacity", share / 100);
  find("opacity-value").textContent = `${share} %`;
}
find("opacity").addEventListener("input", showOpacity);

find("add").addEventListener("click", () => {
  addPanel().querySelector("textarea").focus();
  draw();
});

find("save").addEventListener("click", () =>
  attempt(async () => {
    const drawn = [...panels.children].filter((panel) => !panel.querySelector(".colours").hidden);
    const question = { sentences: drawn.map(sentenceOf), threshold, opacity: Number(find("opacity").value) / 100 };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await (await ask("picture", question)).blob());
    link.download = "heat_map.png";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }),
);

find("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  if (file) openImage(file, file.name);
  event.target.value = ""; // the same file may be chosen again
});

for (const button of document.querySelectorAll(".examples button")) {
  button.addEventListener("click", async () => {
    const file = await (await fetch(button.querySelector("img").src)).blob();
    const input = panels.querySelector("textarea");
    const examples = [...document.querySelectorAll(".examples button")].map((other) => other.dataset.sentence);
    if (!input.value.trim() || examples.includes(input.value)) input.value = button.dataset.sentence;
    openImage(file, button.textContent.trim());
  });
}

for (const kind of ["dragover", "dragleave", "drop"]) {
  window.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    const [file] = kind === "drop" ? event.dataTransfer.files : [];
    if (file) openImage(file, file.name);
  });
}

// What was shown leaves the server's memory with the page.
window.addEventListener("pagehide", () => image && forget(image.token));

addPanel();
showOpacity();
