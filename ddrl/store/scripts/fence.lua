-- Prepended to every script whose first line is "-- fenced": only the newest learner of the run may write.
-- KEYS[1]: state (hash). ARGV[1]: the caller's fencing token; 0 is the operator, who needs no lease.
-- Error GONE where the run is missing or older than the token, FENCED where another learner has taken over.
if ARGV[1] ~= '0' then
  local fence = redis.call('HGET', KEYS[1], 'fence')
  if not fence then return redis.error_reply('GONE the server does not know the run') end
  if tonumber(fence) < tonumber(ARGV[1]) then return redis.error_reply('GONE the server came back older') end
  if fence ~= ARGV[1] then return redis.error_reply('FENCED another learner took over') end
end
