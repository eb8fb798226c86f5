-- Store why a host cannot play a run. Add a journal entry if the host's reason changed. Do nothing if the run is gone.
-- KEYS: 1 state (hash), 2 refusals (hash), 3 journal (stream). ARGV: 1 host, 2 reason, 3 cap of the journal.
-- Answer: none.
if redis.call('EXISTS', KEYS[1]) == 0 then return end
local before = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if before ~= ARGV[2] then
  add_capped(KEYS[3], ARGV[3], 'event', 'refused', 'reason', ARGV[2])
end
