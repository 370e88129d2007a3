// Removes what was compiled, so that a package has no file whose source is gone.
import { rmSync } from "node:fs";

rmSync(new URL("../dist", import.meta.url), { recursive: true, force: true });
