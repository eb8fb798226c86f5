-- Record that a process could not play a run, or ended while it played. Do nothing if the run is gone. A report that
-- arrives again changes nothing, unless 20 others came between.
-- KEYS: 1 state (hash), 2 journal (stream), 3 counts (hash). ARGV: 1 reason, 2 cap of the journal, 3 id of the report.
-- Answer: crashes since the last fragment.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local known = redis.call('HSTRLEN', KEYS[3], 'crash_ids') <= 400 and redis.call('HGET', KEYS[3], 'crash_ids') or ''
if not string.find(known, ARGV[3] .. ' ', 1, true) then
  redis.call('HSET', KEYS[3], 'error', ARGV[1], 'crash_ids', string.sub(ARGV[3] .. ' ' .. known, 1, 20 * (#ARGV[3] + 1)))
  increase(KEYS[3], 'crashes_total', 1)
  add_capped(KEYS[2], ARGV[2], 'event', 'crashed', 'reason', ARGV[1])
  increase(KEYS[3], 'crashes', 1)
end
return number(redis.call('HGET', KEYS[3], 'crashes')) or 0
