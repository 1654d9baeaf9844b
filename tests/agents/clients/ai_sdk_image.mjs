// Two turns about an image with the AI SDK. Arguments: the server's address, the image's file, the provider.
import { readFileSync } from 'node:fs';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText } from 'ai';

const [address, file, provider] = process.argv.slice(2);
const baseURL = `${address}/v1`;
const model = {
  openai: () => createOpenAI({ baseURL, apiKey: 'none' })('tiny'),
  chat: () => createOpenAI({ baseURL, apiKey: 'none' }).chat('tiny'),
  compatible: () => createOpenAICompatible({ name: 'reprise', baseURL })('tiny'),
  anthropic: () => createAnthropic({ baseURL, apiKey: 'none' })('claude-sonnet-4-6'),
}[provider]();
const shown = { type: 'file', data: readFileSync(file), mediaType: 'image/png' };
const messages = [{ role: 'user', content: [{ type: 'text', text: 'What is this?' }, shown] }];
const first = await generateText({ model, messages, maxRetries: 0 });
messages.push(...(first.response?.messages ?? first.responseMessages), { role: 'user', content: 'Are you sure?' });
console.log((await generateText({ model, messages, maxRetries: 0 })).text.trim());
