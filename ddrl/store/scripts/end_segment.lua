-- Note that a process has ended its segment of a run: add its time, and return what was charged too much.
-- Nothing for a process that is not noted as playing: the call may be repeated.
-- KEYS: 1 state (hash), 2 playing (hash), 3 counts (hash). ARGV: 1 process, 2 ms that it spent on the segment, then of
--       these the ms that no append has reported: 3 all, 4 waited for the allowance, 5 waited for room. Answer: none.
local noted = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])  -- first: it works at maxmemory
if not noted or redis.call('EXISTS', KEYS[1]) == 0 then return end
local one, virtual = decode(noted) or {}, number(redis.call('HGET', KEYS[3], 'virtual_ms')) or 0
local charge_ms, weight = number(one.charge_ms) or 0, number(one.weight) or 1
redis.call('HSET', KEYS[3], 'virtual_ms', string.format('%.3f', virtual + (tonumber(ARGV[2]) - charge_ms) / weight))
for i, field in ipairs({'process_ms', 'allowance_wait_ms', 'room_wait_ms'}) do
  if ARGV[i + 2] ~= '0' then increase(KEYS[3], field, ARGV[i + 2]) end
end
