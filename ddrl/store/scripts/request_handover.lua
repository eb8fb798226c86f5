-- Ask the learner of a run to hand it over; the next learner that takes the lease ends the request.
-- KEYS: 1 state (hash), 2 journal (stream). ARGV: 1 host that asks, 2 cap of the journal. Answer: none.
if redis.call('EXISTS', KEYS[1]) == 0 then return end
redis.call('HSET', KEYS[1], 'handover', ARGV[1])
add_capped(KEYS[2], ARGV[2], 'event', 'handover', 'reason', 'asked for by ' .. ARGV[1])
