-- Finds jobs that have not ended and can no longer be claimed, and gives them an entry again. Also removes consumers of
-- dead workers. Each call is one step of the search. All workers of a queue call this script. A call within `pause_ms`
-- after the last step does nothing, so the number of workers does not change the load.
--
-- A job cannot be claimed if its entry is not in the job stream, or if its entry was delivered and is not pending.
-- Redis may lose an entry in a failover, and an operator may delete a stream. A job that is not due has no entry. It must
-- be in the sorted set `later`.
--
-- An entry of a tenant (see _turns.lua) that is not pending must wait for its turn. If the number of claimed jobs of
-- the tenants is higher than the number of pending entries, the claimed jobs are counted again.
--
-- The hashes of the jobs are not in KEYS: SCAN finds them. All of them have the hash tag of the partition.
--
-- KEYS[1]   state     hash with the cursor of the search and the time of the next step
-- KEYS[2]   streams   job stream of priority 'interactive'
-- KEYS[3]   streams   job stream of priority 'bulk'
-- ARGV[1]   group     consumer group of the job streams
-- ARGV[2]   pause_ms  time between two steps in ms
-- ARGV[3]   count     number of keys that one step examines, about
-- ARGV[4]   idle_ms   idle time from which a consumer without pending entries is removed, if its worker is not alive
-- ARGV[5..] workers   ids of the workers that are alive
--
-- Returns the ids of the repaired jobs.

local state, streams, group = KEYS[1], {interactive = KEYS[2], bulk = KEYS[3]}, ARGV[1]
local now, MAX_PENDING = now_ms(), 10000
local progress = redis.call('HMGET', state, 'cursor', 'next_ms')
if now < tonumber(progress[2] or '0') then
  return {}
end

-- Returns whether the entry was delivered to a worker earlier and is not pending now. No worker reads it again.
local function was_dropped(stream, entry)
  if #redis.call('XPENDING', stream, group, entry, entry, 1) > 0 then
    return false
  end
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #fields, 2 do
      info[fields[i]] = fields[i + 1]
    end
    if info['name'] == group then
      local last_ms, last_number = string.match(info['last-delivered-id'], '^(%d+)-(%d+)$')
      ms, number, last_ms, last_number = tonumber(ms), tonumber(number), tonumber(last_ms), tonumber(last_number)
      return ms < last_ms or (ms == last_ms and number <= last_number)
    end
  end
  return false
end

-- Returns whether an entry of a tenant neither waits for its turn nor is pending. Then the entry counts as claimed from
-- now on. A tenant that waits and has no turn gets one.
local function has_lost_turn(stream, tenant, entry)
  if not tenant or #redis.call('XPENDING', stream, group, entry, entry, 1) > 0 then
    return false
  end
  local turns, line, shares = turn_keys(stream, tenant)
  if redis.call('ZSCORE', line, entry) then
    wait_for_turn(stream, tenant, entry)
    return false
  end
  count_claimed(turns, shares, tenant, 1)
  return true
end

-- Counts the claimed jobs of the tenants again, if more are counted than entries are pending: a client may have deleted the
-- hash of a job.
local function correct_shares(stream)
  local turns, _, shares = turn_keys(stream)
  local n_claimed, n_waiting, fields = 0, 0, redis.call('HGETALL', shares)
  for i = 1, #fields, 2 do
    n_claimed = n_claimed + (string.sub(fields[i], 1, 1) == '*' and 0 or fields[i + 1])
  end
  local pending = redis.pcall('XPENDING', stream, group)
  if n_claimed <= (pending[1] or 0) then
    return
  end
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 1) ~= '*' then
      redis.call('HDEL', shares, fields[i])
    end
  end
  for _, item in ipairs(redis.pcall('XPENDING', stream, group, '-', '+', MAX_PENDING)) do
    local found = redis.call('XRANGE', stream, item[1], item[1])[1]
    if found and found[2][3] == 'tenant' then
      redis.call('HINCRBY', shares, found[2][4], 1)
    end
  end
  for _, tenant in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
    n_waiting = n_waiting + redis.call('ZCARD', turns .. ':' .. tenant)
    set_turn(turns, shares, tenant)
  end
  if n_waiting > 0 then
    redis.call('HSET', shares, '*waiting', n_waiting)
  end
end

-- Gives a job that cannot be claimed an entry again. Returns whether the job has a new entry.
local function repair(job, id)
  local fields = redis.pcall('HMGET', job, 'status', 'priority', 'entry', 'run_at_ms', 'tenant')
  if fields.err or not is_open(fields[1]) then
    return false
  end
  if fields[4] then -- it is not due and needs no entry
    return redis.pcall('ZADD', string.match(job, '^(.*:)job:') .. 'later', 'NX', fields[4], id) == 1
  end
  local stream, entry, tenant = streams[fields[2]], fields[3], fields[5]
  if not stream or not entry then
    return false
  end
  local found = redis.pcall('XRANGE', stream, entry, entry)
  if found.err then
    return false -- another client has overwritten the stream
  end
  if #found == 0 then
    redis.pcall('XACK', stream, group, entry)
    leave_turns(stream, tenant, entry)
    set_entry(job, add_entry(stream, id, tenant))
    return true
  end
  if redis.pcall('XPENDING', stream, group).err then
    return false
  end
  if found[1][2][3] == 'tenant' then
    if not has_lost_turn(stream, tenant, entry) then
      return false
    end
  elseif not was_dropped(stream, entry) then
    return false
  end
  redis.call('XCLAIM', stream, group, WAITING, 0, entry, 'IDLE', EXPIRED_IDLE_MS, 'FORCE', 'JUSTID')
  return true
end

local prefix = string.match(KEYS[2], '^(.*:)jobs:') .. 'job:'
local pattern = string.gsub(prefix, '[%*%?%[%]\\]', '\\%0') .. '*'
local page = redis.call('SCAN', progress[1] or '0', 'MATCH', pattern, 'COUNT', ARGV[3])
redis.call('HSET', state, 'cursor', page[1], 'next_ms', now + tonumber(ARGV[2]))
local repaired = {}
for _, job in ipairs(page[2]) do
  local id = string.sub(job, #prefix + 1)
  if repair(job, id) then
    repaired[#repaired + 1] = id
  end
end

local alive = {[WAITING] = true}
for i = 5, #ARGV do
  alive[ARGV[i]] = true
end
for _, stream in pairs(streams) do
  correct_shares(stream)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  for _, fields in ipairs(consumers.err and {} or consumers) do
    local info = {}
    for i = 1, #fields, 2 do
      info[fields[i]] = fields[i + 1]
    end
    if info['pending'] == 0 and not alive[info['name']] and info['idle'] >= tonumber(ARGV[4]) then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, info['name'])
    end
  end
end
return repaired
