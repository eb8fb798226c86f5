-- fenced
-- Give new ids to entries whose ids are later than the clock says: after the largest id a stream takes no entry.
-- No stream takes an id below one that was deleted, so it is written anew; experience that was read goes, as the learner
-- holds it. The entries pass one at a time, since the server has no bound for what its scripts hold.
-- KEYS: 1 state (hash), then streams, of which 2 is experience if there is ARGV[3]. ARGV: 1 token, 2 the latest id that
--       stays, 3 the last entry of experience that was read, or "", whose next day stays, too: the clock may have been
--       set back since, 4 most entries of experience, 5 of another stream; fewer, if they have more than the 40 parts of
--       an append's. Answer: none.
local function milliseconds(id) return tonumber(string.match(id, '%d+')) end

local latest  -- of the stream that is looked at, in ms
local function is_late(id) return milliseconds(id) > latest end

-- Whether the next id would be late, or there is none.
local function is_ahead(key)
  local id, refused = next_id(key)
  if id then return is_late(id) end
  return refused and string.find(refused, 'exhausted')
end

write_when_full(KEYS[1])
for i = 2, #KEYS do
  local is_experience = i == 2 and ARGV[3] ~= ''
  latest = milliseconds(ARGV[2])
  if is_experience then latest = math.max(latest, milliseconds(ARGV[3]) + 86400000) end
  if not is_experience then shrink(KEYS[i]) end
  if is_ahead(KEYS[i]) then
    local lowered = KEYS[i] .. ':lowered'
    redis.call('DEL', lowered)
    if is_experience then
      redis.call('HDEL', KEYS[1], 'counts_set_at')
      if ARGV[3] ~= '0-0' then  -- so that new entries come after the one read last
        redis.call('XADD', lowered, ARGV[3], 'x', '')
        redis.call('XDEL', lowered, ARGV[3])
        redis.call('XTRIM', KEYS[i], 'MINID', ARGV[3])
        redis.call('XDEL', KEYS[i], ARGV[3])
      end
    else
      redis.call('XTRIM', KEYS[i], 'MAXLEN', ARGV[5])
    end
    local left = 40 * tonumber(ARGV[is_experience and 4 or 5])  -- parts
    repeat
      local entry, parts = first_entry('XRANGE', KEYS[i], '-', '+')
      if not entry then break end
      redis.call('XDEL', KEYS[i], entry[1])
      if #entry[2] > 0 then
        redis.call('XADD', lowered, is_late(entry[1]) and '*' or entry[1], unpack(entry[2]))
      end
      left = left - math.max(parts, 40)
    until left <= 0
    redis.call('DEL', KEYS[i])
    if redis.call('EXISTS', lowered) == 1 then redis.call('RENAME', lowered, KEYS[i]) end
  end
end
