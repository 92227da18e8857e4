// Unpacks the browser and its libraries from the npm package @sparticuz/chromium in the working directory.

import {readFileSync, writeFileSync} from "node:fs";
import {brotliDecompressSync} from "node:zlib";

for (const [packed, name] of [["chromium", "chromium"], ["al2023.tar", "libraries.tar"]]) {
  const content = readFileSync(`node_modules/@sparticuz/chromium/bin/${packed}.br`);
  writeFileSync(name, brotliDecompressSync(content), {mode: 0o755});
}
