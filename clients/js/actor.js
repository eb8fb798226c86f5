/* An actor of ddrl in JavaScript: plays CartPole for a run of a DQN that publishes ONNX files (`weights.onnx: true`).
   Written from docs/wire.md.

       npm install --ignore-scripts      # a script of onnxruntime-node would fetch libraries for GPUs
       DDRL_USER=ddrl-worker DDRL_PASSWORD=... node actor.js redis://127.0.0.1:6379 RUN    # or unix:///path/of/a/socket

   It ends when the run ends. Every call has a deadline; after an outage it connects again and repeats its last append,
   which the server counts once. */

import { randomInt } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { crc32 } from "node:zlib";
import ort from "onnxruntime-node";
import { createClient, RESP_TYPES } from "redis";

const [N, MOST_T, O, LIMIT, DEADLINE_MS] = [8, 64, 4, 500, 10_000];
const PASSING = /^(NOSCRIPT|LOADING|OOM|BUSY|MISCONF|READONLY|NOREPLICAS|MASTERDOWN|UNBLOCKED)/; // what the server says

function fail(text) {
  console.error(`actor: error: ${text}`);
  process.exit(1);
}

// --- the environment: Barto, Sutton and Anderson 1983, as gymnasium's CartPole-v1 ----------------------------

class Pole {
  begin() {
    this.at = Array.from({ length: O }, () => 0.1 * Math.random() - 0.05); // position, speed, angle, angular speed
    this.steps = 0;
  }

  /* Take a step of 0.02 s; return whether the pole fell or the cart left the track. */
  step(action) {
    const [position, speed, angle, turning] = this.at;
    const [cosine, sine] = [Math.cos(angle), Math.sin(angle)];
    const push = ((action ? 10 : -10) + 0.05 * turning ** 2 * sine) / 1.1;
    const turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - (0.1 * cosine ** 2) / 1.1));
    const change = [speed, push - (0.05 * turn * cosine) / 1.1, turning, turn];
    this.at = this.at.map((value, i) => value + 0.02 * change[i]);
    this.steps++;
    return Math.abs(this.at[0]) > 2.4 || Math.abs(this.at[2]) > (12 * 2 * Math.PI) / 360;
  }
}

// --- the policy ----------------------------------------------------------------------------------------------

const policy = { version: -1, epsilon: 0, session: null };

async function load(version, weights, file) {
  const length = Number(weights.readBigUInt64LE(0)); // safetensors: a JSON header, then the numbers
  const { epsilon } = JSON.parse(weights.toString("utf8", 8, 8 + length));
  if (!epsilon) fail(`version ${version}: has no epsilon, so it is not a DQN's`);
  policy.epsilon = weights.readFloatLE(8 + length + epsilon.data_offsets[0]);
  const before = policy.session;
  policy.session = await ort.InferenceSession.create(file, { intraOpNumThreads: 1 });
  await before?.release();
  policy.version = version;
}

/* Return an action for each of the observations [N, O]. */
async function act(rows) {
  const observation = new ort.Tensor("float32", rows, [N, O]);
  const { action } = await policy.session.run({ observation }, ["action"]);
  return Array.from(action.data, (best) => (Math.random() < policy.epsilon ? randomInt(2) : Number(best)));
}

// --- a fragment: columns as chunks of blosc2 that are not compressed -------------------------------------------

function chunk(values) {
  const head = Buffer.alloc(32);
  head.set([5, 1, 7, 1]); // format of the chunk and of the codec, flags: stored, size of a number
  head.writeUInt32LE(values.byteLength, 4);
  head.writeUInt32LE(values.byteLength, 8);
  head.writeUInt32LE(values.byteLength + 32, 12);
  return Buffer.concat([head, Buffer.from(values.buffer, values.byteOffset, values.byteLength)]);
}

/* Play T steps of N environments; return the columns, [dtype, shape, values] by name. */
async function play(poles, T, isFirst) {
  const observation = new Float32Array((T + 1) * N * O), action = new BigInt64Array(T * N);
  const terminated = new Uint8Array(T * N), truncated = new Uint8Array(T * N);
  const finals = [], lengths = [], resets = [];
  const begin = (lane, row) => (poles[lane].begin(), resets.push([row, lane]));
  const observe = (row) => poles.forEach((pole, lane) => observation.set(pole.at, (row * N + lane) * O));
  if (isFirst) poles.forEach((_, lane) => begin(lane, 0));
  observe(0);
  for (let t = 0; t < T; t++) {
    const actions = await act(observation.subarray(t * N * O, (t + 1) * N * O));
    poles.forEach((pole, lane) => {
      const place = t * N + lane;
      action[place] = BigInt(actions[lane]);
      terminated[place] = pole.step(actions[lane]);
      truncated[place] = !terminated[place] && pole.steps === LIMIT;
      if (truncated[place]) finals.push([t, lane, pole.at]);
      if (!terminated[place] && !truncated[place]) return;
      lengths.push(pole.steps);
      begin(lane, t + 1);
    });
    observe(t + 1);
  }
  const [K, E, R] = [finals.length, lengths.length, resets.length];
  return {
    observation: ["float32", [T + 1, N, O], observation],
    action: ["int64", [T, N], action],
    reward: ["float32", [T, N], new Float32Array(T * N).fill(1)],
    terminated: ["bool", [T, N], terminated],
    truncated: ["bool", [T, N], truncated],
    final_index: ["int32", [K, 2], Int32Array.from(finals.flatMap(([t, lane]) => [t, lane]))],
    final_observation: ["float32", [K, O], Float32Array.from(finals.flatMap(([, , at]) => at))],
    episode_return: ["float32", [E], Float32Array.from(lengths)],
    episode_length: ["int32", [E], Int32Array.from(lengths)],
    reset_index: ["int32", [R, 2], Int32Array.from(resets.flat())],
    reset_seed: ["int64", [R], new BigInt64Array(R).fill(-1n)],
  };
}

/* Return the names and values of an entry in turn. */
function fieldsOf(columns, facts) {
  const described = [], fields = [];
  let checksum = 0;
  for (const [name, [dtype, shape, values]] of Object.entries(columns)) {
    described.push({ name, dtype, shape, bytes: values.byteLength });
    if (!values.byteLength) continue;
    fields.push(name, chunk(values));
    checksum = crc32(fields.at(-1), checksum);
  }
  return ["h", JSON.stringify({ format: 1, ...facts, C: 0, columns: described, checksum }), ...fields];
}

// --- the server ------------------------------------------------------------------------------------------------

const [url, run] = process.argv.slice(2);
if (!run || process.argv.length !== 4) fail("use: actor.js URL RUN");
const socket = { reconnectStrategy: 500, connectTimeout: DEADLINE_MS, socketTimeout: DEADLINE_MS };
const place = url.startsWith("unix://") ? { socket: { path: url.slice(7), ...socket } } : { url, socket };
const { DDRL_USER: username, DDRL_PASSWORD: password } = process.env;
const client = createClient({ username, password, ...place, commandOptions: { timeout: DEADLINE_MS } });
const key = (name) => `ddrl:{${run}}:${name}`;
let isTold = false;
client.on("error", (error) => {
  if (/WRONGPASS|NOAUTH|NOPERM/.test(error.message)) fail(`${url}: ${error.message}`);
  if (!isTold) console.error(`actor: ${url} does not answer; asks again`);
  isTold = true;
});

/* Return the answer to a command, however long the server is away. */
async function ask(words, typeMapping = {}) {
  for (;;) {
    try {
      return await client.sendCommand(words, { typeMapping, timeout: DEADLINE_MS });
    } catch (error) {
      const comesBack = !/^[A-Z]{3,} /.test(error.message) || PASSING.test(error.message);
      if (!comesBack) fail(`the server refuses ${words[0]}: ${error.message}`);
      await sleep(500);
    }
  }
}

const state = async (field) => (await ask(["HGET", key("state"), field])) ?? "";

/* Play with a version of the weights, if the server still keeps it. */
async function use(version) {
  if (version === policy.version || version < 0) return;
  const names = [`weights:${version}`, `weights:${version}:onnx`].map(key);
  const [weights, file] = await ask(["MGET", ...names], { [RESP_TYPES.BLOB_STRING]: Buffer });
  if (weights && file) await load(version, weights, file);
  else if (weights) fail(`run ${run}: publishes no ONNX files; submit it with -s weights.onnx=true`);
}

/* Append a fragment; return [answer, version, id of the allowance, steps to append next]. */
async function append(sha, who, steps, fields, lengths, playedMs, processMs) {
  const keys = ["state", "counts", "experience", "episodes", "draining", "producers"].map(key);
  const size = fields.reduce((sum, field) => sum + Buffer.byteLength(field), 128);
  const returns = lengths.length ? JSON.stringify(Array.from(lengths)) : "";
  const played = [steps, size, Math.round(playedMs), "js", "-", 0, returns, 20_000, Math.round(processMs), 0, 0];
  const words = ["EVALSHA", sha, "6", ...keys, ...[...who, ...played].map(String), ...fields];
  for (;;) {
    const answer = await ask(words);
    if (answer[0] !== "FULL") return answer;
    await sleep(250);
  }
}

/* Wait until the run wants steps; return [how many, its newest version], 0 steps once it has ended. */
async function awaitTurn() {
  for (;;) {
    const played = Number(await ask(["HGET", key("counts"), "appended_steps"]));
    const names = ["status", "version", "allowance_id", "allowance", "players"];
    const [status, newest, after, allowance, players] = await ask(["HMGET", key("state"), ...names]);
    const version = Number(newest ?? -1), left = Number(allowance) - played;
    if (status !== "active" && status !== "paused") return [0, version];
    if (status === "paused" || version < 0) await sleep(200);
    else if (left > 0) return [players > 1 ? Math.ceil(left / (2 * players)) : left, version];
    else await ask(["XREAD", "BLOCK", "500", "STREAMS", key("allowance"), after ?? "0-0"]);
  }
}

await client.connect();
const wire = await state("wire");
if (!wire) fail(`run ${run}: not on this server`);
const { format, append: sha } = JSON.parse(wire);
if (format !== 1) fail(`run ${run}: speaks format ${format}, this actor 1; use a newer actor`);
if (JSON.parse(await state("spaces")).env_id !== "CartPole-v1") fail(`run ${run}: does not play CartPole-v1`);
const { env, rollout } = JSON.parse(await ask(["GET", key("spec")]));
if (env.num_envs < N) fail(`run ${run}: takes fragments of ${env.num_envs} environments, this actor's have ${N}`);

const producer = await ask(["INCR", "ddrl:producers"]), incarnation = randomInt(2 ** 47);
const poles = Array.from({ length: N }, () => new Pole());
const started = performance.now();
let [left, version, numSteps, reported] = [0, -1, 0, started];
for (let seq = 0; ; seq++) {
  if (left <= 0) [left, version] = await awaitTurn();
  if (left <= 0) break;
  for (await use(version); policy.version < 0; await use(version)) version = Number(await state("version"));
  const T = Math.min(MOST_T, rollout.max_fragment_steps, Math.max(1, Math.floor(left / N)));
  const began = performance.now();
  const columns = await play(poles, T, seq === 0);
  const facts = { run, producer, incarnation, seq, policy_version: policy.version, host: "js", T, N };
  const fields = fieldsOf(columns, facts), lengths = columns.episode_length[2];
  const now = performance.now();
  const reply = await append(sha, [producer, incarnation, seq], T * N, fields, lengths, now - began, now - reported);
  [reported, numSteps, version] = [now, numSteps + T * N, Number(reply[1])];
  if (reply[0] === "STOPPED") break;
  left = reply[0] === "GO" ? Number(reply[3]) : 0;
}
const seconds = (performance.now() - started) / 1e3;
console.log(`${numSteps} steps in ${seconds.toFixed(1)} s: ${Math.round(numSteps / seconds)} steps/s`);
client.destroy();
