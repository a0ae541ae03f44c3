// Makes a page follow: swaps a part when the server has a newer one. Without this script a reload shows the same.
"use strict";
(() => {
  const SILENCE = 8000; // ms; the server says something every three seconds
  const broken = document.getElementById("broken");
  let heard = Date.now();

  const sign = () => {
    heard = Date.now();
    broken.hidden = true;
  };

  // Focus stays where it was, also when its element is made anew.
  const swap = (element, html) => {
    const focused = element.contains(document.activeElement) ? document.activeElement : null;
    const href = focused && focused.getAttribute("href");
    element.innerHTML = html;
    if (href) {
      for (const link of element.querySelectorAll("a[href]")) {
        if (link.getAttribute("href") === href) {
          link.focus({ preventScroll: true });
          break;
        }
      }
    }
  };

  const stream = new EventSource("/live?page=" + encodeURIComponent(document.body.dataset.page));
  stream.addEventListener("beat", sign);
  stream.addEventListener("part", (event) => {
    sign();
    const part = JSON.parse(event.data);
    const element = document.getElementById(part.id);
    if (element && element.innerHTML !== part.html) swap(element, part.html);
  });
  setInterval(() => {
    if (Date.now() - heard > SILENCE) broken.hidden = false;
    // A browser gives up on an answer that is no stream; a reload after a restart is right in any case.
    if (stream.readyState === EventSource.CLOSED && Date.now() - heard > 2 * SILENCE) location.reload();
  }, 1000);
})();
