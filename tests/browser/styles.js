// The computed style of each element of an exhibit that is ours: "tag.class: value | value | ...".
(root) => {
  const box = ["text-align", "vertical-align", "white-space", "color", "background-color", "background-image", "display",
    ...["top", "right", "bottom", "left"].flatMap((side) => [`border-${side}-width`, `border-${side}-style`,
      `border-${side}-color`, `padding-${side}`, `margin-${side}`]), "border-top-left-radius", "font-family",
    "font-size", "font-weight", "font-style", "line-height", "text-indent", "text-transform", "text-decoration-line",
    "letter-spacing", "word-spacing", "word-break", "overflow-wrap", "opacity", "direction", "position", "box-sizing"];
  const drawn = ["font-family", "font-size", "font-weight", "font-style", "font-variant", "letter-spacing", "word-spacing",
    "text-transform", "text-anchor", "text-decoration-line", "text-shadow", "direction", "opacity", "display", "visibility"];
  const mine = [...root.querySelectorAll(".kvlab-view,.kvlab-view *")].filter((e) => e.tagName !== "STYLE");
  const shapes = [...root.querySelectorAll("svg.kvlab text")];
  const say = (e, names) => { const s = getComputedStyle(e);
    return `${e.tagName}.${e.getAttribute("class") ?? ""}: ` + names.map((n) => `${n}=${s.getPropertyValue(n)}`).join(" | "); };
  return [...mine.map((e) => say(e, box)), ...shapes.map((e) => say(e, drawn))];
}
