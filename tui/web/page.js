// Keys go to the terminal without a click: as soon as the other side is there, which is told of the focus.
addEventListener("load", () => {
  const keys = document.querySelector(".xterm-helper-textarea");
  new MutationObserver((_, watch) => {
    if (!document.body.classList.contains("-first-byte")) return;
    watch.disconnect();
    keys?.focus();
  }).observe(document.body, { attributeFilter: ["class"] });
});
