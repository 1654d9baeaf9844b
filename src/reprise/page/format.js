const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

export const many = (value, one, more = `${one}s`) => `${num(value)} ${value === 1 ? one : more}`;
export const num = (value) => (value === null || value === undefined ? "–" : whole.format(value));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at === 0 || value >= 100 ? whole.format(value) : one.format(value)} ${units[at]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${one.format(value * 1000)} ms`;
  if (value < 0.9995) return `${whole.format(value * 1000)} ms`;
  if (value < 60) return `${value < 9.95 ? value.toFixed(2) : one.format(value)} s`;
  return parts(value).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
}

// The two largest units of a time: [[4, "h"], [12, "min"]].
export function parts(value) {
  if (value < 9.95) return [[value.toFixed(value < 0.995 && value > 0 ? 2 : 1), "s"]];
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let left = Math.round(value);
  const found = [];
  for (const [unit, length] of units) {
    const amount = Math.floor(left / length);
    left -= amount * length;
    if (amount > 0 || found.length > 0) found.push([String(amount), unit]);
    if (found.length === 2) break;
  }
  return found.filter(([amount], at) => at === 0 || amount !== "0");
}

export const ago = (value) => (value < 1.5 ? "now" : `${parts(Math.max(10, value)).slice(0, 1).map(([a, u]) => `${value < 10 ? Math.round(value) : a} ${u}`)} ago`);
export const share = (part, total) => (total > 0 ? `${whole.format((100 * part) / total)} %` : "–");
export const rate = (value) => (value === null || value === undefined ? "–" : `${value < 10 ? one.format(value) : whole.format(value)}`);
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
