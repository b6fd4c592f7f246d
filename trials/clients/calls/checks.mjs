// Common parts of the scripts for command lines of npm: a line of output for each call, and programs run as users do.
import { spawn } from "node:child_process";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";

export const BASE_URL = `${process.env.HALLMARK_URL}/v1`;
export const MODEL = "demo";
export const FOLDER = process.env.CLIENT_FOLDER;
export const HOME = join(FOLDER, "home"); // where the program keeps its settings and what it has said
export const PROJECT = join(HOME, "project"); // where it works

let failed = 0;
const running = new Set();
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => (stop(), process.exit(1)));
process.on("exit", stop);

function stop() {
  for (const child of running) child.kill("SIGKILL");
}

export function expect(isSo, what) {
  if (!isSo) throw new Error(what);
}

export async function call(name, run) {
  let why = null;
  try {
    await run();
  } catch (error) {
    why = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
    failed = 1;
  }
  console.log(`{"call": ${JSON.stringify(name)}, "why": ${JSON.stringify(why)}}`);
}

export function end() {
  process.exit(failed);
}

// Write files below an empty HOME, by their paths; a text or an object of JSON.
export function settle(files) {
  rmSync(HOME, { recursive: true, force: true });
  mkdirSync(PROJECT, { recursive: true });
  for (const [path, content] of Object.entries(files)) {
    mkdirSync(dirname(join(HOME, path)), { recursive: true });
    writeFileSync(join(HOME, path), typeof content === "string" ? content : JSON.stringify(content));
  }
}

// Run a command of the client's packages in the project, without input, and return its output once it has ended with 0.
export function command(name, args, environ = {}) {
  const env = { PATH: `${join(FOLDER, "node_modules", ".bin")}:${process.env.PATH}`, HOME, XDG_CONFIG_HOME: join(HOME, ".config"), NO_COLOR: "1", ...environ };
  const child = spawn(join(FOLDER, "node_modules", ".bin", name), args, { cwd: PROJECT, env, stdio: ["ignore", "pipe", "pipe"] });
  running.add(child);
  let out = "", errors = "";
  child.stdout.on("data", (data) => (out += data));
  child.stderr.on("data", (data) => (errors += data));
  return new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", (code) => {
      running.delete(child);
      if (code === 0) resolve(out);
      else reject(new Error(`${name} ended with ${code}: ${out.slice(-150)} ${errors.slice(-150)}`));
    });
  });
}

// The objects of an output that has one a line.
export function lines(out) {
  return out.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
}
