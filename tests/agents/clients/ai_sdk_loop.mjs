// A tool loop, and structured output with tools, with the AI SDK. Arguments: the server's address, the provider.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [address, provider] = process.argv.slice(2);
const baseURL = `${address}/v1`;
const model = {
  openai: () => createOpenAI({ baseURL, apiKey: 'none' })('tiny'),
  chat: () => createOpenAI({ baseURL, apiKey: 'none' }).chat('tiny'),
  compatible: () => createOpenAICompatible({ name: 'reprise', baseURL, supportsStructuredOutputs: true })('tiny'),
  // By the name the provider decides whether `output_config` is sent, or a tool of the answer's shape.
  anthropic: () => createAnthropic({ baseURL, apiKey: 'none' })('claude-sonnet-4-6'),
}[provider]();
let calls = 0;
const look = tool({
  description: 'Read a file.',
  inputSchema: z.object({ path: z.string() }),
  execute: async ({ path }) => {
    calls += 1;
    return `hello from ${path}`;
  },
});
const asked = { model, tools: { look }, stopWhen: stepCountIs(5), maxRetries: 0 };
const streamed = streamText({
  ...asked,
  prompt: 'What does a.txt say?',
  onError: ({ error }) => {
    throw error;
  },
});
const told = { answer: (await streamed.text).trim(), calls };
const { output } = await generateText({
  ...asked,
  prompt: 'As JSON: what does a.txt say?',
  output: Output.object({ schema: z.object({ says: z.string() }) }),
});
told.structured = output;
console.log(JSON.stringify(told));
