"use strict";
// Comfort only: hover, switches, the current section. The page says everything without it.
(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // A page opened from a file may have no storage; then a choice lasts as long as the page.
  const remember = (key, value) => { try { localStorage.setItem("yunlu-" + key, value); } catch { /* no storage */ } };
  const recall = (key) => { try { return localStorage.getItem("yunlu-" + key); } catch { return null; } };

  const language = () => root.dataset.language;
  const speak = (wanted) => {
    root.dataset.language = wanted;
    root.lang = wanted === "zh" ? "zh-CN" : "en";
    for (const button of document.querySelectorAll("[data-set-language]")) {
      button.setAttribute("aria-pressed", String(button.dataset.setLanguage === wanted));
    }
  };
  for (const button of document.querySelectorAll("[data-set-language]")) {
    button.addEventListener("click", () => {
      speak(button.dataset.setLanguage);
      remember("language", button.dataset.setLanguage);
    });
  }
  const spoken = recall("language");
  speak(spoken === "zh" || spoken === "en" ? spoken : language());

  const shade = recall("theme");
  if (shade === "light" || shade === "dark") root.dataset.theme = shade;
  document.getElementById("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    remember("theme", root.dataset.theme);
  });

  const digits = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  };
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
    return value.toFixed(at ? 1 : 0) + " " + units[at];
  };
  const clock = (seconds) => {
    if (seconds < 1) return Number((seconds * 1000).toPrecision(3)) + " ms";
    if (seconds < 60) return seconds.toFixed(1) + " s";
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600);
    const minutes = String(Math.floor((whole % 3600) / 60)), rest = String(whole % 60).padStart(2, "0");
    return hours ? `${hours} h ${minutes.padStart(2, "0")} min` : `${minutes} min ${rest} s`;
  };
  const show = (value, unit) => {
    if (typeof value === "string") return value; // NaN and the infinities travel as words
    if (unit === "bytes") return bytes(value);
    if (unit === "duration") return clock(value);
    if (unit === "percent") return Number((value * 100).toPrecision(4)) + " %";
    return digits(value);
  };
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] <= steps[high] - wanted ? low : high;
  };

  const tip = document.getElementById("tip");
  const line = (left, right) => {
    const row = document.createElement("p");
    const name = document.createElement("span"), value = document.createElement("b");
    name.textContent = left; // text, never markup: names come from data
    value.textContent = right;
    row.append(name, value);
    return row;
  };

  for (const chart of document.querySelectorAll(".chart")) {
    const { unit, axis, series, marks } = JSON.parse(chart.querySelector("script").textContent);
    const timed = axis === "duration"; // in seconds; else in steps
    const place = (x) => timed ? clock(x) : x.toLocaleString("en");
    const steps = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
    chart.querySelector(".scales input")?.addEventListener("change", (event) => {
      chart.dataset.scale = event.target.checked ? "log" : "linear";
    });
    for (const plot of chart.querySelectorAll(".plot")) {
      const low = Number(plot.dataset.low), high = Number(plot.dataset.high);
      const cursor = document.createElement("div");
      cursor.className = "cursor";
      cursor.hidden = true;
      plot.append(cursor);
      let current = steps.length - 1;

      const point = (index) => {
        current = index;
        const step = steps[index], box = plot.getBoundingClientRect();
        const share = (step - low) / (high - low);
        cursor.hidden = tip.hidden = false;
        cursor.style.left = share * 100 + "%";
        const chinese = language() === "zh";
        const over = timed ? (chinese ? "时间" : "time") : (chinese ? "步" : "step");
        tip.replaceChildren(line(over, place(step)));
        for (const { name, x, y } of series) {
          const at = nearest(x, step);
          // An evaluation far from here would read as if it belonged to this step.
          if (Math.abs(x[at] - step) > (high - low) / 50) continue;
          tip.append(line(name[chinese ? 1 : 0], show(y[at], unit)));
        }
        for (const { name, x } of marks) {
          const at = x[nearest(x, step)];
          if (Math.abs(at - step) <= (high - low) / 200) tip.append(line(name[chinese ? 1 : 0], place(at)));
        }
        const x = box.left + share * box.width;
        const left = x + 14 + tip.offsetWidth > innerWidth ? x - 14 - tip.offsetWidth : x + 14;
        tip.style.left = Math.max(4, left) + "px";
        tip.style.top = Math.max(4, box.top + 8) + "px";
      };
      const leave = () => { cursor.hidden = tip.hidden = true; };
      const follow = (event) => {
        const box = plot.getBoundingClientRect();
        point(nearest(steps, low + ((event.clientX - box.left) / box.width) * (high - low)));
      };
      plot.addEventListener("pointermove", follow);
      plot.addEventListener("pointerdown", follow);
      plot.addEventListener("pointerleave", leave);
      plot.addEventListener("blur", leave);
      plot.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
        if (!by) return;
        event.preventDefault();
        point(Math.min(steps.length - 1, Math.max(0, current + by)));
      });
    }
  }

  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const sections = [...links.keys()].map((id) => document.getElementById(id)).filter(Boolean);
  const mark = () => {
    const seen = sections.filter((section) => section.getBoundingClientRect().top < innerHeight / 3);
    for (const link of links.values()) link.removeAttribute("aria-current");
    if (seen.length) links.get(seen.at(-1).id).setAttribute("aria-current", "true");
  };
  addEventListener("scroll", mark, { passive: true });
  mark();

  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details")) each.open = true;
  });
})();
