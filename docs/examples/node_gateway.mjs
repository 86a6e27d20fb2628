// From Node without a package: a chat at the gateway, printed as it is generated.
// SHARDLINE_API_KEY=... node docs/examples/node_gateway.mjs http://localhost:8000

const url = process.argv[2] ?? "http://localhost:8000";
const answer = await fetch(`${url}/v1/completions`, {
  method: "POST",
  headers: {
    Authorization: `Bearer ${process.env.SHARDLINE_API_KEY}`,
    "Content-Type": "application/json",
  },
  body: JSON.stringify({ model: "clerk", prompt: "date: 3 March 2021 =", temperature: 0, stream: true }),
});
if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
console.log(answer.headers.get("x-request-id"));

let rest = "";
for await (const bytes of answer.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + bytes).split("\n");
  rest = lines.pop();
  for (const line of lines.filter((one) => one.startsWith("data: {")))
    process.stdout.write(JSON.parse(line.slice("data: ".length)).choices[0]?.text ?? "");
}
console.log();
