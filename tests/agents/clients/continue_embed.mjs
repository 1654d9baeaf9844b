// Vectors with Continue's own adapter. Arguments: the server's address, the model, the texts as JSON.
import { constructLlmApi } from '@continuedev/openai-adapters';

const [address, model, given] = process.argv.slice(2);
const texts = JSON.parse(given);
const api = constructLlmApi({ provider: 'openai', apiBase: `${address}/v1/`, apiKey: 'none' });
const embedded = async (input) => (await api.embed({ model, input })).data.map((each) => each.embedding);
console.log(JSON.stringify({ vectors: await embedded(texts), query: (await embedded([texts[0]]))[0] }));
