// Puts the parts together: keys, theme, the two panes.

import { getKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const $ = (id) => document.getElementById(id);
const THEME = "strata.theme";

function askForKey() {
  const dialog = $("ask");
  if (dialog.open) return;
  $("secret").value = getKey();
  dialog.showModal();
}

$("ask").addEventListener("close", () => {
  if ($("ask").returnValue === "ok") setKey($("secret").value.trim());
  $("secret").value = "";
  live.locked = false;
  if ($("ask").returnValue === "ok") live.wake();
});
$("secret").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // the form's first button is the other one
  $("ask").close("ok");
});

function showTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

function otherTheme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const name = dark === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, name);
  showTheme(name);
  if (live.last) live.draw(live.last);
}

function toggleLive() {
  const hidden = document.body.classList.toggle("alone");
  $("toggle").setAttribute("aria-expanded", String(!hidden));
  if (!hidden && live.last) live.draw(live.last);
}

showTheme(localStorage.getItem(THEME));
const live = new Live(askForKey);
const chat = new Chat(askForKey);
if (matchMedia("(max-width: 760px)").matches) toggleLive();

$("new").addEventListener("click", () => chat.clear());
$("key").addEventListener("click", askForKey);
$("theme").addEventListener("click", otherTheme);
$("toggle").addEventListener("click", toggleLive);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("ask").open) chat.stop();
  if (event.altKey && event.code === "KeyN") chat.clear();
  if (event.altKey && event.code === "KeyL") toggleLive();
  if (event.key === "/" && event.target === document.body) {
    event.preventDefault();
    $("prompt").focus();
  }
});
