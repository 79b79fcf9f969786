// Draws the page's figures, in the page's colours.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figures = [];
  let choice = remembered();

  // A page opened from a file may be refused any memory.
  function remembered() {
    try {
      return localStorage.getItem("commtrace-theme") || "auto";
    } catch {
      return "auto";
    }
  }

  function remember() {
    try {
      localStorage.setItem("commtrace-theme", choice);
    } catch {
      // Then the choice holds until the page is closed.
    }
  }

  function wear(theme) {
    root.dataset.theme = theme;
    document.querySelector("#theme span").textContent = choice;
  }

  function chosen() {
    return choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
  }

  // The layout in the page's colours. The page shows the title itself.
  function dressed(layout) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const base = layout.template.layout;
    const axis = (old) => ({ ...old, gridcolor: colour("--grid"), linecolor: colour("--grid"), zerolinecolor: colour("--grid") });
    return {
      ...layout,
      title: undefined,
      // What was zoomed stays so when the colours change.
      uirevision: "page",
      template: {
        ...layout.template,
        layout: {
          ...base,
          font: { ...base.font, color: colour("--ink") },
          paper_bgcolor: "rgba(0,0,0,0)",
          margin: { ...base.margin, t: 10 },
          xaxis: axis(base.xaxis),
          yaxis: axis(base.yaxis),
          hoverlabel: { ...base.hoverlabel, bgcolor: colour("--card"), bordercolor: colour("--soft"), font: { ...base.hoverlabel.font, color: colour("--ink") } },
        },
      },
    };
  }

  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  function draw({ place, figure }) {
    return Plotly.react(place, figure.data, dressed(figure.layout), config);
  }

  function redraw(theme) {
    wear(theme);
    return Promise.all(figures.map(draw));
  }

  document.getElementById("theme").addEventListener("click", () => {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice] || "auto";
    remember();
    redraw(chosen());
  });
  dark.addEventListener("change", () => redraw(chosen()));
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    redraw("light");
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    redraw(chosen());
  });

  wear(chosen());
  for (const place of document.querySelectorAll(".figure")) {
    figures.push({ place, figure: JSON.parse(place.nextElementSibling.textContent) });
  }
  // One after the other, so that the page can be read and moved meanwhile.
  (async () => {
    for (const one of figures) {
      await draw(one);
      await new Promise((next) => setTimeout(next));
    }
    root.dataset.drawn = figures.length;
  })();
})();
