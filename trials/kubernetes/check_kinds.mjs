// Reads manifests as a JSON array, writes the problems of each as a JSON array of arrays. Each manifest is checked twice: as
// an object literal of its kind's type, which refuses unknown keys, and by its kind's validator, which knows patterns.
//   node check_kinds.mjs FOLDER_WITH_NODE_MODULES < manifests.json
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
const ts = createRequire(join(folder, "package.json"))("typescript");
const PACKAGES = {
  "argoproj.io": "@kubernetes-models/argo-rollouts",
  "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
  "keda.sh": "@kubernetes-models/keda",
  "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
};

/** The module of a manifest's kind, or null where no package has it. */
function moduleOf({ apiVersion, kind }) {
  const group = String(apiVersion).split("/")[0];
  const name = `${PACKAGES[group] ?? "kubernetes-models"}/${apiVersion}/${kind}`;
  return existsSync(join(folder, "node_modules", `${name}.d.ts`)) ? name : null;
}

/** What the compiler says of each manifest as a literal of its kind's type. */
function typeProblems(manifests, modules) {
  const files = manifests.map((manifest, index) => {
    const file = join(folder, `manifest${index}.ts`);
    const name = modules[index];
    const text = name
      ? `import type { I${manifest.kind} } from "${name}";\nexport const it: I${manifest.kind} = ${JSON.stringify(manifest, null, 1)};\n`
      : "export {};\n";
    writeFileSync(file, text);
    return file;
  });
  const options = {
    noEmit: true,
    strict: true,
    skipLibCheck: true,
    module: ts.ModuleKind.NodeNext,
    moduleResolution: ts.ModuleResolutionKind.NodeNext,
    types: [],
  };
  const program = ts.createProgram(files, options);
  return files.map((file) =>
    ts.getPreEmitDiagnostics(program, program.getSourceFile(file)).map((it) => ts.flattenDiagnosticMessageText(it.messageText, " ")),
  );
}

/** What the validator of its kind says of a manifest. */
async function valueProblems(manifest, name) {
  const module = await import(pathToFileURL(join(folder, "node_modules", `${name}.js`)));
  try {
    new module[manifest.kind](manifest).validate();
    return [];
  } catch (error) {
    return [error.message];
  }
}

const manifests = JSON.parse(readFileSync(0, "utf8"));
const modules = manifests.map(moduleOf);
const types = typeProblems(manifests, modules);
const problems = [];
for (const [index, manifest] of manifests.entries()) {
  const name = modules[index];
  problems.push(
    name
      ? [...types[index], ...(await valueProblems(manifest, name))]
      : [`${manifest.apiVersion} ${manifest.kind} is a kind that no package here knows`],
  );
}
console.log(JSON.stringify(problems));
