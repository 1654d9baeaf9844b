// Both SDKs against the server at the address given: each check throws if it does not hold.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';

const [url, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'secret', maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: 'secret', maxRetries: 0 });
const hi = [{ role: 'user', content: 'Hi' }];
const schema = { type: 'object', properties: { city: { type: 'string' } } };

const checks = {
  async 'chat completions'() {
    const made = await openai.chat.completions.create({ model, messages: hi });
    assert.equal(made.choices[0].message.content, 'Hello there.');
    const stream = openai.chat.completions.stream({ model, messages: hi });
    assert.equal(await stream.finalContent(), 'Hello there.');
  },
  async 'chat completions with tools'() {
    const tools = [{ type: 'function', function: { name: 'get_weather', parameters: schema } }];
    const made = await openai.chat.completions.stream({ model, messages: hi, tools }).finalChatCompletion();
    const [call] = made.choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: 'Paris' });
  },
  async 'responses'() {
    const made = await openai.responses.create({ model, input: 'Hi' });
    assert.equal(made.output_text, 'Hello there.');
    const tools = [{ type: 'function', name: 'get_weather', parameters: schema, strict: false }];
    const kinds = [];
    for await (const event of await openai.responses.create({ model, input: hi, tools, stream: true })) {
      kinds.push(event.type);
    }
    assert.equal(kinds[0], 'response.created');
    assert.equal(kinds.at(-1), 'response.completed');
    assert.ok(kinds.includes('response.function_call_arguments.done'));
    const next = await openai.responses.create({ model, input: 'And?', previous_response_id: made.id });
    assert.ok(next.usage.input_tokens_details.cached_tokens > 0);
  },
  async 'messages'() {
    const made = await anthropic.messages.create({ model, max_tokens: 100, messages: hi });
    assert.deepEqual(made.content.map((block) => block.type), ['thinking', 'text']);
    const stream = anthropic.messages.stream({ model, max_tokens: 100, messages: hi });
    assert.equal(await stream.finalText(), 'Hello there.');
  },
  async 'messages in a tool loop'() {
    const tools = [{ name: 'get_weather', input_schema: schema }];
    const asked = { model, max_tokens: 100, tools };
    const first = await anthropic.messages.stream({ ...asked, messages: hi }).finalMessage();
    assert.equal(first.stop_reason, 'tool_use');
    const result = { type: 'tool_result', tool_use_id: first.content.at(-1).id, content: 'sunny' };
    const messages = [...hi, { role: 'assistant', content: first.content }, { role: 'user', content: [result] }];
    const second = await anthropic.messages.create({ ...asked, messages });
    assert.equal(second.stop_reason, 'end_turn');
    assert.ok(second.usage.cache_read_input_tokens > 0);
    const { input_tokens } = await anthropic.messages.countTokens({ model, tools, messages });
    const { usage } = second;
    assert.equal(
      usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens, input_tokens);
  },
  async 'errors'() {
    await assert.rejects(openai.chat.completions.create({ model, messages: [] }), OpenAI.BadRequestError);
    await assert.rejects(openai.responses.retrieve('resp_none'), OpenAI.NotFoundError);
    await assert.rejects(
      anthropic.messages.create({ model, max_tokens: 1, messages: [] }), Anthropic.BadRequestError);
    const stranger = new Anthropic({ baseURL: url, apiKey: 'wrong', maxRetries: 0 });
    await assert.rejects(
      stranger.messages.create({ model, max_tokens: 1, messages: hi }), Anthropic.AuthenticationError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
  } catch (error) {
    console.error(`${name}: ${error.stack}`);
    process.exitCode = 1;
  }
}
