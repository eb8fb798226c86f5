-- Append an entry to one of a run's capped streams. Do nothing if the run is gone, so that its keys do not come back.
-- KEYS: 1 state (hash), 2 the stream. ARGV: 1 cap, then field and value in turn. Answer: none.
if redis.call('EXISTS', KEYS[1]) == 1 then add_capped(KEYS[2], ARGV[1], unpack(ARGV, 2)) end
