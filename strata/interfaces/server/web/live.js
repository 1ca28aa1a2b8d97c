// The live view: asks /stats every second while somebody can see it, and draws what came.

import { getJson } from "./api.js";
import { element } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const EVERY = 1000; // milliseconds
const KEPT = 120; // points of the curve
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) (count /= 1024), unit++;
  return `${count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${UNITS[unit]}`;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Live {
  constructor(onKeyNeeded) {
    this.onKeyNeeded = onKeyNeeded;
    this.curve = [];
    $("heat").addEventListener("pointermove", (event) => this.point(event));
    document.addEventListener("visibilitychange", () => this.wake());
    addEventListener("resize", () => this.last && this.draw(this.last));
    this.loop();
  }

  async loop() {
    for (;;) {
      await this.ask();
      await new Promise((done) => {
        this.wake = done;
        // A hidden page asks nothing; a key that is missing comes with `wake`.
        if (!document.hidden && !this.locked) setTimeout(done, EVERY);
      });
    }
  }

  wake() {}

  async ask() {
    if (document.hidden) return;
    try {
      const stats = await getJson("stats", AbortSignal.timeout(10 * EVERY));
      this.locked = false;
      this.rates(stats);
      this.draw(stats);
      this.last = stats;
    } catch (error) {
      this.failed(error);
    }
  }

  failed(error) {
    const status = $("status");
    status.textContent = error.status === 401 ? "key needed" : "not reachable";
    status.dataset.state = "dead";
    if (error.status === 401 && !this.locked) {
      this.locked = true;
      this.onKeyNeeded();
    }
  }

  rates(stats) {
    const before = this.last;
    this.speed = { decode: 0, prefill: 0 };
    if (before?.tokens && stats.tokens && stats.now > before.now) {
      const seconds = stats.now - before.now;
      this.speed.decode = Math.max(0, stats.tokens.decode - before.tokens.decode) / seconds;
      this.speed.prefill = Math.max(0, stats.tokens.prefill - before.tokens.prefill) / seconds;
    }
    this.curve.push(this.speed.decode);
    if (this.curve.length > KEPT) this.curve.shift();
  }

  draw(stats) {
    $("model").textContent = stats.model ?? "no model yet";
    const loading = stats.loading;
    const share = loading?.done == null ? "" : ` ${Math.round(100 * loading.done)} %`;
    $("status").textContent = loading ? `${loading.stage}${share}` : stats.status === "ok" ? "ready" : stats.status;
    $("status").dataset.state = stats.status;
    for (const name of ["decode", "prefill"]) $(name).textContent = this.speed[name].toFixed(this.speed[name] < 100 ? 1 : 0);
    $("running").textContent = stats.requests.running;
    $("waiting").textContent = stats.requests.waiting;
    this.drawCurve();
    this.drawRegions(stats.regions);
    $("experts").hidden = !stats.experts;
    if (stats.experts) this.drawExperts(stats.experts);
  }

  // A canvas as sharp as the screen; returns its context and its size in CSS pixels.
  canvas(id, height) {
    const canvas = $(id);
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    if (height) canvas.style.height = `${height}px`;
    const size = [Math.round(width * ratio), Math.round((height ?? canvas.clientHeight) * ratio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, size[1] / ratio);
    return [context, width, size[1] / ratio];
  }

  drawCurve() {
    const [context, width, height] = this.canvas("pace", 34);
    const most = Math.max(...this.curve, 1);
    const at = (index) => [(width * (index + KEPT - this.curve.length)) / (KEPT - 1), height - 2 - ((height - 4) * this.curve[index]) / most];
    context.beginPath();
    this.curve.forEach((_, index) => context.lineTo(...at(index)));
    context.strokeStyle = colour("--accent");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(at(0)[0], height);
    context.globalAlpha = 0.15;
    context.fillStyle = colour("--accent");
    context.fill();
    context.globalAlpha = 1;
  }

  drawRegions(regions) {
    const rows = regions.map((region) => {
      const row = element("div", "", "region");
      const share = region.total ? region.used / region.total : 0;
      const name = element("span", `${region.tier}: ${region.name}`, "name");
      const kept = region.kept ? ` (${bytes(region.kept)} kept)` : "";
      const value = element("span", `${bytes(region.used)} of ${bytes(region.total)}${kept}`, "value");
      const bar = element("div", "", "bar");
      bar.setAttribute("role", "meter");
      bar.setAttribute("aria-label", `${region.tier} ${region.name}`);
      bar.setAttribute("aria-valuenow", (100 * share).toFixed(0));
      const water = element("div", "", `water ${region.tier}`);
      water.style.width = `${100 * share}%`;
      bar.append(water);
      if (region.kept) {
        const rest = element("div", "", "kept");
        rest.style.left = `${100 * share}%`;
        rest.style.width = `${(100 * region.kept) / region.total}%`;
        rest.title = "prefixes kept for prompts that begin alike";
        bar.append(rest);
      }
      if (region.peak > region.used && region.total) {
        const peak = element("div", "", "peak");
        peak.style.left = `${(100 * region.peak) / region.total}%`;
        bar.append(peak);
      }
      row.append(name, value, bar);
      return row;
    });
    $("regions").replaceChildren(...rows);
  }

  drawExperts(experts) {
    const rows = experts.layers.length;
    $("shape").textContent = `${rows} layers × ${experts.count}`;
    const cell = Math.max(3, Math.min(14, Math.floor(360 / Math.max(rows, 1))));
    const [context, width] = this.canvas("heat", rows * cell);
    const wide = width / experts.count;
    const gap = wide > 4 && cell > 4 ? 1 : 0;
    const ramp = [colour("--cold"), colour("--warm"), colour("--hot")].map(channels);
    experts.heat.forEach((shades, row) => {
      for (let index = 0; index < experts.count; index++) {
        context.fillStyle = shade(ramp, parseInt(shades.substr(2 * index, 2), 16) / 255);
        context.fillRect(index * wide, row * cell, wide - gap, cell - gap);
      }
    });
    this.cells = { cell, wide, experts };
    this.drawServed(experts);
  }

  drawServed(experts) {
    const names = { hits: "hits", late: "on their way", fetched: "fetched", streamed: "streamed", computed: "computed by the CPU" };
    const before = this.last?.experts;
    const counts = Object.keys(names).map((name) => [name, experts[name], before ? experts[name] - before[name] : 0]);
    const all = counts.reduce((sum, [, count]) => sum + count, 0);
    $("served").hidden = !all;
    $("served").replaceChildren(
      ...counts.map(([name, count]) => element("span", `${names[name]} ${((100 * count) / (all || 1)).toFixed(1)} %`, `served ${name}`)),
    );
    $("ratesTitle").hidden = !experts.layer_hits.length || !all;
    const bars = experts.layers.map((layer) => {
      const hits = experts.layer_hits[layer] ?? 0;
      const uses = hits + (experts.layer_misses[layer] ?? 0);
      const bar = element("div", "", "rate");
      bar.title = `layer ${layer}: ${uses ? ((100 * hits) / uses).toFixed(1) : "0"} % of ${uses}`;
      const inner = element("div");
      inner.style.height = `${uses ? (100 * hits) / uses : 0}%`;
      bar.append(inner);
      return bar;
    });
    $("rates").replaceChildren(...($("ratesTitle").hidden ? [] : bars));
  }

  point(event) {
    if (!this.cells) return;
    const { cell, wide, experts } = this.cells;
    const row = Math.floor(event.offsetY / cell);
    const index = Math.floor(event.offsetX / wide);
    if (!experts.heat[row] || index >= experts.count) return;
    const share = parseInt(experts.heat[row].substr(2 * index, 2), 16) / 255;
    $("spot").textContent = `Layer ${experts.layers[row]}, expert ${index}: ${(100 * share * share).toFixed(0)} % of the most used`;
  }
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function shade(ramp, value) {
  const place = value * (ramp.length - 1);
  const low = Math.min(Math.floor(place), ramp.length - 2);
  const mixed = ramp[low].map((channel, at) => Math.round(channel + (ramp[low + 1][at] - channel) * (place - low)));
  return `rgb(${mixed.join(",")})`;
}
