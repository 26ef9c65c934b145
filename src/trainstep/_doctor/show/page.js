// A button to copy what is to be pasted into an issue. Without it the text can still be selected.
for (const text of document.querySelectorAll(".trainstep-doctor .versions")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.ariaLive = "polite";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
    } catch {
      getSelection().selectAllChildren(text);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  text.before(button);
}

// A link to a function opens its traces.
const open = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener("hashchange", open);
open();
