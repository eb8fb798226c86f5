-- Append a fragment once, count it, and answer what its collector should do next.
-- KEYS: 1 state (hash), 2 counts (hash), 3 experience (stream), 4 episodes (stream), 5 draining (set of nodes),
--       6 producers (hash: id -> JSON: incarnation (text), seq, last_ms, host, node, pid, fragments, duplicates).
--         `fragments` grows by the step in `seq`, so fragments that the server lost in a restart are counted too.
-- ARGV: 1 producer, 2 incarnation, 3 seq, 4 transitions, 5 bytes, 6 ms spent stepping environments,
--       7 host, 8 node, 9 pid, 10 returns of finished episodes (JSON, or ""), 11 cap of the episodes stream,
--       12 ms of the process since its last append; of these, ms that it waited for 13 allowance and 14 room;
--       then the fragment's fields and values
-- Answer: {GO | WAIT | YIELD | FULL | STOPPED (see `stream.Answer`), newest version, id of the newest allowance entry,
--         steps that this producer should append next (negative: overshoot)}. A repeated append writes no entry and
--         counts as a duplicate; its answer is that of the present state. `stream.remaining` has the same rule.
local state = redis.call('HMGET', KEYS[1], 'status', 'allowance', 'version', 'allowance_id', 'max_bytes', 'players',
  'folded', 'trimmed_bytes', 'max_producers')
local counts = counts_of(KEYS[2], 'appended_fragments', 'appended_steps', 'appended_bytes', 'played_ms', 'process_ms',
  'crashes', 'claim', 'claim_until_ms')
local status, allowance, version = state[1], tonumber(state[2] or 0), tonumber(state[3] or -1)
local allowance_id, max_bytes, players = state[4] or '0-0', tonumber(state[5] or 0), tonumber(state[6] or 1)
local fragments, steps, bytes = counts[1] or 0, counts[2] or 0, counts[3] or 0
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
-- Half of an even share, so that producers overshoot little.
local shares = players > 1 and 2 * players or 1
local function left()
  if steps < allowance then return math.ceil((allowance - steps) / shares) end
  return allowance - steps
end
local function full()
  increase(KEYS[2], 'full', 1)
  return {'FULL', version, allowance_id, left()}
end

-- A claim lapses within seconds; a worker may have written any time.
local function is_claimed()
  local until_ms = counts[8] or 0
  return now_ms < until_ms and until_ms <= now_ms + 100000
end

local stored = redis.call('HGET', KEYS[6], ARGV[1])
-- A folded producer's `seq` is gone, so a repeated append would count twice. Ids grow: an unknown id up to `folded`
-- was folded, or was taken earlier and never appended.
local is_folded = not stored and tonumber(ARGV[1]) <= tonumber(state[7] or 0)
-- A server that came back older may give an id again: it is of the incarnation that appended first.
local producer = stored and decode(stored) or {}
local is_taken = producer.incarnation and producer.incarnation ~= ARGV[2]
-- Only another's: a producer appends its fragments in order, and repeats the newest.
local newest_seq, seq = producer.incarnation == ARGV[2] and number(producer.seq) or -1, tonumber(ARGV[3])
if is_folded or is_taken or seq < newest_seq or (status ~= 'active' and status ~= 'paused') then
  return {'STOPPED', version, allowance_id, 0}
end
if not stored and redis.call('HLEN', KEYS[6]) >= tonumber(state[9] or 1000) then return full() end

if seq == newest_seq then
  increase(KEYS[2], 'duplicates', 1)
else
  if bytes - tonumber(state[8] or 0) + tonumber(ARGV[5]) > max_bytes then return full() end
  -- Fields: see stream.py.
  local entry = {'f', fragments + 1, 'n', steps + ARGV[4], 'b', bytes + ARGV[5], 's', ARGV[5],
    'p', ARGV[1], 'i', ARGV[2], 'q', ARGV[3]}
  for i = 15, #ARGV do entry[#entry + 1] = ARGV[i] end
  if not add(KEYS[3], '*', unpack(entry)) then return full() end
  fragments, steps, bytes = entry[2], entry[4], entry[6]
  redis.call('HSET', KEYS[2], 'appended_fragments', fragments, 'appended_steps', steps, 'appended_bytes', bytes,
    'played_ms', (counts[4] or 0) + ARGV[6], 'process_ms', (counts[5] or 0) + ARGV[12])
  if ARGV[13] ~= '0' then increase(KEYS[2], 'allowance_wait_ms', ARGV[13]) end
  if ARGV[14] ~= '0' then increase(KEYS[2], 'room_wait_ms', ARGV[14]) end
  if fragments == 1 then redis.call('HSETNX', KEYS[2], 'first_step_ms', now_ms - tonumber(ARGV[6])) end
  -- A fragment ends a series of crashes.
  if counts[6] ~= 0 then redis.call('HSET', KEYS[2], 'crashes', 0) end
  if ARGV[10] ~= '' then
    add_capped(KEYS[4], ARGV[11], 'returns', ARGV[10], 'env_steps', steps)
  end
end
redis.call('HSET', KEYS[6], ARGV[1], cjson.encode({
  incarnation = ARGV[2], seq = seq, last_ms = now_ms, host = ARGV[7], node = ARGV[8],
  pid = tonumber(ARGV[9]), fragments = (number(producer.fragments) or 0) + seq - newest_seq,
  duplicates = (number(producer.duplicates) or 0) + (seq == newest_seq and 1 or 0),
}))

local answer = 'GO'
if status == 'paused' or redis.call('SISMEMBER', KEYS[5], ARGV[8]) == 1 then
  answer = 'YIELD'
elseif (counts[7] or 0) > 0 and is_claimed() then
  redis.call('HSET', KEYS[2], 'claim', counts[7] - 1)
  answer = 'YIELD'
elseif steps >= allowance then
  answer = 'WAIT'
end
return {answer, version, allowance_id, left()}
