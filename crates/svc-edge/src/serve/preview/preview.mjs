// Draws every layer of a pack in a colour of its own. What became of it is written into the page's root element.
import { Map as View, NavigationControl } from "./maplibre-gl.mjs";

const root = document.documentElement;
const note = document.getElementById("note");

function colour(index) {
  return `hsl(${(index * 137) % 360} 60% 40%)`;
}

// A layer may hold points, lines and areas alike; each is drawn by the layer that can.
function vectorLayers(layers) {
  return layers.flatMap(({ id }, index) => {
    const common = { source: "pack", "source-layer": id };
    const of = (...types) => ["match", ["geometry-type"], types, true, false];
    return [
      { ...common, id: `${id} area`, type: "fill", filter: of("Polygon", "MultiPolygon"),
        paint: { "fill-color": colour(index), "fill-opacity": 0.3 } },
      { ...common, id: `${id} line`, type: "line", filter: of("LineString", "MultiLineString", "Polygon", "MultiPolygon"),
        paint: { "line-color": colour(index), "line-width": 1.5 } },
      { ...common, id: `${id} point`, type: "circle", filter: of("Point", "MultiPoint"),
        paint: { "circle-color": colour(index), "circle-radius": 4 } },
    ];
  });
}

function fail(error) {
  root.dataset.map = "failed";
  note.textContent = String((error && error.message) || error);
}

async function show() {
  const url = new URL(`/edge/packs/${root.dataset.pack}.json`, location.href).href;
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  const about = await answer.json();
  const vector = Array.isArray(about.vector_layers);
  const layers = vector ? vectorLayers(about.vector_layers) : [{ id: "pack", type: "raster", source: "pack" }];
  const source = vector ? { type: "vector", url } : { type: "raster", url, tileSize: 256 };
  const background = { id: "background", type: "background", paint: { "background-color": "#f4f4f0" } };
  const map = new View({
    container: "map",
    style: { version: 8, sources: { pack: source }, layers: [background, ...layers] },
    center: about.center ? about.center.slice(0, 2) : [0, 0],
    zoom: about.center ? about.center[2] : about.minzoom || 0,
    hash: true,
  });
  map.addControl(new NavigationControl());
  map.on("error", ({ error }) => fail(error));
  map.on("idle", () => {
    if (root.dataset.map === "failed") return;
    root.dataset.features = vector ? map.queryRenderedFeatures().length : 0;
    root.dataset.map = "idle";
  });
}

show().catch(fail);
