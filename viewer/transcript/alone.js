// Transcripts in a file that leaves the viewer (page.py): everything is in it, one episode is shown at a time, and which
// one is the part of the address after #.

const stored = JSON.parse(document.getElementById("data").textContent);

function showEpisode() {
  const wanted = stored.find(({ id }) => `#${id}` === location.hash) ?? stored[0];
  for (const { id } of stored) {
    document.getElementById(id).hidden = id !== wanted.id;
    document.querySelector(`a[href="#${id}"]`)?.classList.toggle("chosen", id === wanted.id);
  }
  mount({ parentElement: document.getElementById("transcript"), data: wanted.data });
  // The browser went to the name while it was hidden, and the index may be higher than a screen.
  if (location.hash) document.getElementById(wanted.id).scrollIntoView();
}

window.addEventListener("hashchange", showEpisode);
showEpisode();
