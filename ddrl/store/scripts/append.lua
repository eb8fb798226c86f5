-- KEYS: 1 state (hash), 2 experience (stream), 3 episodes (stream), 4 draining (set),
--       5 producers (hash: id -> "incarnation seq steps ms host fragments duplicates node")
-- ARGV: 1 producer, 2 incarnation, 3 seq, 4 transitions, 5 bytes, 6 played ms, 7 host, 8 node, 9 episodes (JSON or ""),
--       10 cap of the episodes stream, 11 process ms, 12 and 13 ms waited for allowance and room, 14... fields
local state = redis.call('HMGET', KEYS[1], 'status', 'allowance', 'version', 'allowance_id', 'max_bytes',
  'appended_fragments', 'appended_steps', 'appended_bytes', 'trimmed_bytes', 'players', 'crashes', 'claim',
  'claim_until_ms', 'first_step_ms', 'retired')
local status, allowance, version = state[1], tonumber(state[2] or 0), tonumber(state[3] or -1)
local allowance_id, max_bytes = state[4] or '0-0', tonumber(state[5] or 0)
local fragments, steps = tonumber(state[6] or 0), tonumber(state[7] or 0)
local bytes, trimmed = tonumber(state[8] or 0), tonumber(state[9] or 0)
local players = tonumber(state[10] or 1)
local shares = players > 1 and 2 * players or 1
local function left()
  if steps < allowance then return math.ceil((allowance - steps) / shares) end
  return allowance - steps
end
if status ~= 'active' and status ~= 'paused' then return {'STOPPED', version, allowance_id, 0} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local incarnation, seq, played, seen, host, count, doubles, node
local last = redis.call('HGET', KEYS[5], ARGV[1])
if last then
  incarnation, seq, played, seen, host, count, doubles, node =
    string.match(last, '^(%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (%d+) (%S+)$')
end
played, count, doubles = tonumber(played or 0), tonumber(count or 0), tonumber(doubles or 0)
if not last and tonumber(ARGV[1]) <= tonumber(state[15] or 0) then  -- retired; what it repeats is known no more
  return {'STOPPED', version, allowance_id, 0}
end
if incarnation == ARGV[2] and tonumber(ARGV[3]) <= tonumber(seq) then
  redis.call('HINCRBY', KEYS[1], 'duplicates', 1)
  redis.call('HSET', KEYS[5], ARGV[1], table.concat(
    {incarnation, seq, string.format('%.0f', played), seen, host, count, doubles + 1, node}, ' '))
else
  if bytes - trimmed + tonumber(ARGV[5]) > max_bytes then
    redis.call('HINCRBY', KEYS[1], 'full', 1)
    return {'FULL', version, allowance_id, left()}
  end
  fragments, steps, bytes = fragments + 1, steps + tonumber(ARGV[4]), bytes + tonumber(ARGV[5])
  local entry = {'f', fragments, 'n', steps, 'b', bytes, 's', ARGV[5], 'p', ARGV[1], 'i', ARGV[2], 'q', ARGV[3]}
  for i = 14, #ARGV do entry[#entry + 1] = ARGV[i] end
  redis.call('XADD', KEYS[2], '*', unpack(entry))
  redis.call('HSET', KEYS[1], 'appended_fragments', fragments, 'appended_steps', steps, 'appended_bytes', bytes)
  if not state[14] then redis.call('HSET', KEYS[1], 'first_step_ms', now_ms - tonumber(ARGV[6])) end
  if state[11] and state[11] ~= '0' then redis.call('HSET', KEYS[1], 'crashes', 0) end
  redis.call('HINCRBY', KEYS[1], 'played_ms', ARGV[6])
  redis.call('HINCRBY', KEYS[1], 'process_ms', ARGV[11])
  if ARGV[12] ~= '0' then redis.call('HINCRBY', KEYS[1], 'allowance_wait_ms', ARGV[12]) end
  if ARGV[13] ~= '0' then redis.call('HINCRBY', KEYS[1], 'room_wait_ms', ARGV[13]) end
  redis.call('HSET', KEYS[5], ARGV[1], table.concat({ARGV[2], ARGV[3],
    string.format('%.0f', played + tonumber(ARGV[4])), string.format('%.0f', now_ms), ARGV[7], count + 1, doubles,
    ARGV[8]}, ' '))
  if ARGV[9] ~= '' then
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[10], '*', 'returns', ARGV[9], 'env_steps', steps)
  end
end
local answer = 'GO'
if status == 'paused' or redis.call('SISMEMBER', KEYS[4], ARGV[8]) == 1 then
  answer = 'YIELD'
elseif tonumber(state[12] or 0) > 0 and now_ms < tonumber(state[13] or 0) then
  redis.call('HINCRBY', KEYS[1], 'claim', -1)
  answer = 'YIELD'
elseif steps >= allowance then
  answer = 'WAIT'
end
return {answer, version, allowance_id, left()}
