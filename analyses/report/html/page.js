// Draws the page's figures, in the page's colours.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figures = [];
  let choice = storedChoice();

  // Browsers may deny storage to a page opened from a file.
  function storedChoice() {
    try {
      return localStorage.getItem("commtrace-theme") || "auto";
    } catch {
      return "auto";
    }
  }

  function storeChoice() {
    try {
      localStorage.setItem("commtrace-theme", choice);
    } catch {
      // The choice then lasts until the page is closed.
    }
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    document.querySelector("#theme span").textContent = choice;
  }

  function chosenTheme() {
    return choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
  }

  // Returns a layout in the page's colours, without the title, which is a heading of the page.
  function themedLayout(layout) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const base = layout.template.layout;
    const themedAxis = (axis) => ({ ...axis, gridcolor: colour("--grid"), linecolor: colour("--grid"), zerolinecolor: colour("--grid") });
    return {
      ...layout,
      title: undefined,
      // Zoom is kept when the colours change.
      uirevision: "page",
      template: {
        ...layout.template,
        layout: {
          ...base,
          font: { ...base.font, color: colour("--ink") },
          paper_bgcolor: "rgba(0,0,0,0)",
          margin: { ...base.margin, t: 10 },
          xaxis: themedAxis(base.xaxis),
          yaxis: themedAxis(base.yaxis),
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
    return Plotly.react(place, figure.data, themedLayout(figure.layout), config);
  }

  function redraw(theme) {
    setTheme(theme);
    return Promise.all(figures.map(draw));
  }

  document.getElementById("theme").addEventListener("click", () => {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice] || "auto";
    storeChoice();
    redraw(chosenTheme());
  });
  dark.addEventListener("change", () => redraw(chosenTheme()));
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    redraw("light");
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    redraw(chosenTheme());
  });

  setTheme(chosenTheme());
  for (const place of document.querySelectorAll(".figure")) {
    figures.push({ place, figure: JSON.parse(place.nextElementSibling.textContent) });
  }
  // Draw one after the other, so that the page stays responsive.
  (async () => {
    for (const figure of figures) {
      await draw(figure);
      await new Promise((next) => setTimeout(next));
    }
    root.dataset.drawn = figures.length;
  })();
})();
