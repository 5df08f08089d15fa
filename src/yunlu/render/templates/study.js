"use strict";
// Comfort only: pointing at a trial anywhere lights it up everywhere and reads it out.
(() => {
  const tip = document.getElementById("tip");
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const spoken = (name) => Array.isArray(name) ? name[document.documentElement.dataset.language === "zh" ? 1 : 0] : name;
  const line = (left, right) => {
    const row = document.createElement("p");
    const name = document.createElement("span"), value = document.createElement("b");
    name.textContent = spoken(left); // text, never markup: names come from data
    value.textContent = spoken(right);
    row.append(name, value);
    return row;
  };

  let lit = null;
  const light = (number) => {
    if (number === lit) return;
    lit = number;
    for (const each of document.querySelectorAll(".lit")) each.classList.remove("lit");
    document.body.classList.toggle("pointing", number !== null);
    if (number === null) return;
    for (const each of document.querySelectorAll(`[data-trial="${number}"]`)) {
      each.classList.add("lit");
      if (each.matches("path")) each.parentNode.append(each); // on top of the others
    }
  };
  const tell = (number, x, y) => {
    tip.hidden = false;
    tip.replaceChildren(...(facts[number] || []).map(([name, value]) => line(name, value)));
    const left = x + 18 + tip.offsetWidth > innerWidth ? x - 18 - tip.offsetWidth : x + 18;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.min(Math.max(4, y - 20), innerHeight - tip.offsetHeight - 4) + "px";
  };
  const leave = () => { tip.hidden = true; light(null); };

  for (const picture of document.querySelectorAll(".picture")) {
    const points = JSON.parse(picture.querySelector("script").textContent);
    const order = [...new Set(points.map(([, , number]) => number))].sort((a, b) => a - b);
    const plot = picture.querySelector(".plot");
    let current = -1;
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      let found = null, nearest = 45 ** 2;
      for (const [x, y, number] of points) {
        const far = (box.left + x * box.width - event.clientX) ** 2 + (box.bottom - y * box.height - event.clientY) ** 2;
        if (far < nearest) { nearest = far; found = number; }
      }
      if (found === null) return leave();
      current = order.indexOf(found);
      light(found);
      tell(found, event.clientX, event.clientY);
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!by || !order.length) return;
      event.preventDefault();
      current = Math.min(order.length - 1, Math.max(0, current + by));
      const [x, y] = points.find(([, , number]) => number === order[current]);
      const box = plot.getBoundingClientRect();
      light(order[current]);
      tell(order[current], box.left + x * box.width, box.bottom - y * box.height);
    });
  }
  for (const row of document.querySelectorAll("tr[data-trial]")) {
    row.addEventListener("pointerenter", () => light(Number(row.dataset.trial)));
    row.addEventListener("pointerleave", () => light(null));
  }
})();
