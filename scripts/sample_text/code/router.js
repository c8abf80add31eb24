// A small HTTP server with routes, without a framework.
import http from "node:http";
import { readFile } from "node:fs/promises";
import path from "node:path";

const routes = [];

export function route(method, pattern, handler) {
  const names = [];
  const source = pattern.replace(/:(\w+)/g, (_, name) => {
    names.push(name);
    return "([^/]+)";
  });
  routes.push({ method, names, regexp: new RegExp(`^${source}$`), handler });
}

function match(method, pathname) {
  let allowed = false;
  for (const { method: wanted, names, regexp, handler } of routes) {
    const found = regexp.exec(pathname);
    if (!found) continue;
    if (wanted !== method) {
      allowed = true;
      continue;
    }
    const params = Object.fromEntries(names.map((name, i) => [name, decodeURIComponent(found[i + 1])]));
    return { handler, params };
  }
  return { status: allowed ? 405 : 404 };
}

async function body(request, limit = 1 << 20) {
  const chunks = [];
  let size = 0;
  for await (const chunk of request) {
    size += chunk.length;
    if (size > limit) throw Object.assign(new Error("The request is too large."), { status: 413 });
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString("utf8");
}

const notes = new Map();
let nextId = 1;

route("GET", "/notes", () => ({ json: [...notes.values()] }));

route("GET", "/notes/:id", ({ params }) => {
  const note = notes.get(Number(params.id));
  return note ? { json: note } : { status: 404, json: { error: "no such note" } };
});

route("POST", "/notes", async ({ request }) => {
  const { title, text = "" } = JSON.parse(await body(request));
  if (!title) return { status: 422, json: { error: "a note needs a title" } };
  const note = { id: nextId++, title, text, created: new Date().toISOString() };
  notes.set(note.id, note);
  return { status: 201, json: note };
});

route("DELETE", "/notes/:id", ({ params }) => ({ status: notes.delete(Number(params.id)) ? 204 : 404 }));

route("GET", "/static/:name", async ({ params }) => {
  const file = path.join("public", path.basename(params.name));
  return { text: await readFile(file, "utf8") };
});

export const server = http.createServer(async (request, response) => {
  const { pathname, searchParams } = new URL(request.url, "http://localhost");
  const found = match(request.method, pathname);
  let answer;
  try {
    answer = found.handler ? await found.handler({ ...found, request, searchParams }) : { status: found.status };
  } catch (error) {
    answer = { status: error.status ?? 500, json: { error: error.message } };
  }
  const content = answer.json === undefined ? (answer.text ?? "") : JSON.stringify(answer.json);
  response.writeHead(answer.status ?? 200, {
    "content-type": answer.json === undefined ? "text/plain; charset=utf-8" : "application/json",
    "content-length": Buffer.byteLength(content),
  });
  response.end(content);
});

if (process.argv[1] === new URL(import.meta.url).pathname) {
  const port = Number(process.env.PORT ?? 8080);
  server.listen(port, () => console.log(`listening on port ${port}`));
}
