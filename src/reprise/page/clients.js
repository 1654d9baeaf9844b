// One line to paste for each client.
import { $, h, put } from "./dom.js";
import { hasKey } from "./server.js";

export function draw(model) {
  const url = location.origin, key = hasKey() ? "YOUR_KEY" : "none", name = model.split("/").at(-1);
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`, quoted = quote(name);
  const provider = `model_providers.reprise={name="Reprise",base_url="${url}/v1",wire_api="responses"${hasKey() ? ',env_key="REPRISE_API_KEY"' : ""}}`;
  const known = `- {model_id: reprise, model_name: ${JSON.stringify(name)}, api_base: "${url}/v1", api_key_name: reprise}`;
  const lines = [
    ["curl", `curl ${url}/v1/chat/completions ${hasKey() ? `-H 'Authorization: Bearer ${key}' ` : ""}-H 'Content-Type: application/json' -d '{"messages":[{"role":"user","content":"Hello"}]}'`],
    ["Claude Code", `ANTHROPIC_BASE_URL=${url} ANTHROPIC_AUTH_TOKEN=${key} ANTHROPIC_MODEL=${quoted} ANTHROPIC_DEFAULT_HAIKU_MODEL=${quoted} claude`],
    ["OpenAI’s libraries", `export OPENAI_BASE_URL=${url}/v1 OPENAI_API_KEY=${key}`],
    ["Codex", `${hasKey() ? `REPRISE_API_KEY=${key} ` : ""}codex -c model_provider=reprise -c model=${quoted} -c ${quote(provider)}`],
    ["Aider", `OPENAI_API_BASE=${url}/v1 OPENAI_API_KEY=${key} aider --model openai/${quoted}`],
    ["Ollama’s clients", `export OLLAMA_HOST=${url}${hasKey() ? ` OLLAMA_API_KEY=${key}` : ""}`],
    ["llm", `printf '%s\\n' ${quote(known)} >> "$(dirname "$(llm logs path)")/extra-openai-models.yaml"; llm -m reprise --key ${key} 'Hello'`],
    ["In a terminal", `${hasKey() ? `REPRISE_API_KEY=${key} ` : ""}reprise top --url ${url}`],
  ];
  put($("clients"), lines.map(([client, line]) => {
    const copy = h("button", { type: "button", "aria-label": `Copy the line for ${client}` }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(line);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    return h("div", { class: "client" }, h("h3", {}, client), h("div", {}, h("pre", { tabindex: 0 }, line), navigator.clipboard ? copy : null));
  }));
}
