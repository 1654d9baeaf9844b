// Two turns about an image with `ollama` for JavaScript. Arguments: the server's address, the image's file.
import { Ollama } from 'ollama';

const [host, file] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: 'user', content: 'What is this?', images: [file] }];
const first = await client.chat({ model: 'tiny', messages });
messages.push(first.message, { role: 'user', content: 'Are you sure?' });
console.log((await client.chat({ model: 'tiny', messages })).message.content.trim());
