-- fenced
-- Give new ids to entries whose ids are later than the clock says: after the largest id a stream takes no entry.
-- No stream takes an id below one that was deleted, so it is written anew; experience that was read goes, as the learner
-- holds it. Of streams longer than any that ddrl writes the newest entries stay: all of them pass through memory.
-- KEYS: 1 state (hash), 2 experience (stream), then other streams. ARGV: 1 token, 2 the latest id that stays,
--       3 the last entry of experience that was read. Answer: none.
local function milliseconds(id) return tonumber(string.match(id, '%d+')) end

local function is_late(id) return milliseconds(id) > milliseconds(ARGV[2]) end

-- Whether the next id would be late, or there is none. XINFO would look at entries, which may be large.
local function is_ahead(key)
  local id = redis.pcall('XADD', key, 'NOMKSTREAM', '*', 'x', '')
  if not id then return false end
  if type(id) == 'table' then return string.find(id.err, 'exhausted') end
  redis.call('XDEL', key, id)
  return is_late(id)
end

for i = 2, #KEYS do
  if i > 2 then shrink(KEYS[i]) end
  if is_ahead(KEYS[i]) then
    local entries
    if i == 2 then
      entries = newest(KEYS[i], '(' .. ARGV[3], '+', 2e7, math.huge, math.huge)
    else
      entries = newest(KEYS[i], '-', '+', 300000, 2 ^ 25, 2 ^ 19)
    end
    redis.call('DEL', KEYS[i])
    if i == 2 and ARGV[3] ~= '0-0' then  -- so that new entries come after the one read last
      redis.call('XADD', KEYS[i], ARGV[3], 'x', '')
      redis.call('XDEL', KEYS[i], ARGV[3])
    end
    for at = #entries, 1, -1 do
      local entry = entries[at]
      redis.call('XADD', KEYS[i], is_late(entry[1]) and '*' or entry[1], unpack(entry[2]))
    end
  end
end
