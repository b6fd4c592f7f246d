// Reads a dashboard as JSON, writes what Grafana's own types have against it as a JSON array of lines. It is compiled as an
// object literal, which refuses unknown keys; an enum's values may be written as their texts.
//   node check_dashboard.mjs FOLDER_WITH_NODE_MODULES < dashboard.json
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const folder = process.argv[2];
const ts = createRequire(join(folder, "package.json"))("typescript");
const TYPES = "./node_modules/@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen";
const text = `import type { Dashboard } from "${TYPES}";
type Plain<T> = T extends string ? (string extends T ? T : \`\${T}\`) : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Query = { expr: string; step: string; titleFormat: string; textFormat: string }; // of Prometheus' annotations
type Event = Plain<NonNullable<NonNullable<Dashboard["annotations"]>["list"]>[number]> & Query;
type Board = Plain<Omit<Dashboard, "annotations">> & { annotations: { list: Event[] } };
export const it: Board = ${JSON.stringify(JSON.parse(readFileSync(0, "utf8")), null, 1)};
`;
const file = join(folder, "dashboard.ts");
writeFileSync(file, text);
const options = {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  types: [],
};
const program = ts.createProgram([file], options);
const problems = ts.getPreEmitDiagnostics(program, program.getSourceFile(file));
console.log(JSON.stringify(problems.map((it) => ts.flattenDiagnosticMessageText(it.messageText, " "))));
