// A text field above each table inside <div class="filtered">: rows that lack one of its words are hidden.
document$.subscribe(() => {
  for (const box of document.querySelectorAll(".filtered")) {
    if (box.querySelector("input")) continue;
    const field = document.createElement("input");
    const count = document.createElement("span");
    const rows = [...box.querySelectorAll("tbody tr")];
    field.type = "search";
    field.placeholder = "filter: qwen3, gemma, decoder, rotary ...";
    field.setAttribute("aria-label", "Filter the table");
    const update = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = ` ${shown} of ${rows.length}`;
    };
    field.addEventListener("input", update);
    box.prepend(field, count);
    update();
  }
});
