-- Finds jobs that have not ended and can no longer be claimed, and gives them an entry again. Also removes consumers of
-- dead workers, and events and idempotency records whose jobs do not exist. Each call is one step of the search. All workers
-- of a queue call this script. A call within `pause_ms` after the last step does nothing, so the number of workers does not
-- change the load.
--
-- A job cannot be claimed if it has no entry in the job stream, or if its entry was delivered and is not pending.
-- Redis may lose an entry in a failover, and an operator may delete a stream. A job that is not due has no entry. It must
-- be in the sorted set `later`.
--
-- An entry of a tenant (see _turns.lua) that is not pending must wait for its turn. The numbers of claimed jobs of the
-- tenants are compared with the pending entries, and corrected.
--
-- If the clock was set back, the leases of running jobs would expire later by as much. They are renewed once: a lease of a
-- worker that has died since then expires after its usual time.
--
-- The keys of the jobs are not in KEYS: SCAN finds them. All of them have the hash tag of the partition.
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

local state, streams = KEYS[1], {interactive = KEYS[2], bulk = KEYS[3]}
local group, pause_ms, count, max_idle_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local now = now_ms()
local MAX_PENDING = 10000 -- pending entries of a stream whose jobs are counted at most
local MAX_COMPARED = 200 -- pending entries of a stream up to which each step counts their jobs
local cursor, next_ms = unpack(redis.call('HMGET', state, 'cursor', 'next_ms'))
local left_ms = tonumber(next_ms or '0') - now
local was_set_back = left_ms > pause_ms
if left_ms > 0 and not was_set_back then
  return {}
end

-- Returns whether the entry was delivered to a worker earlier and is not pending now. No worker reads it again.
local function was_dropped(stream, entry)
  if is_pending(stream, group, entry) then
    return false
  end
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  for _, list in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = by_name(list)
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
  if not tenant or is_pending(stream, group, entry) then
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

-- Returns the number of claimed jobs of each tenant: the jobs of the pending entries. The tenant is that in the hash of the
-- job, as at the end of the job. The entry of an older job without a tenant has none (see read.lua).
local function count_claimed_jobs(stream)
  local counted = {}
  for _, item in ipairs(redis.pcall('XPENDING', stream, group, '-', '+', MAX_PENDING)) do
    local entry = unpack(item)
    local id = job_id_in(fields_of_entry(stream, entry))
    if id then
      local own_entry, tenant = fields_if_hash(job_key(stream, id), 'entry', 'tenant')
      if tenant and own_entry == entry then
        counted[tenant] = (counted[tenant] or 0) + 1
      end
    end
  end
  return counted
end

-- Returns whether the numbers in `claimed` are those in `counted`.
local function are_equal(claimed, counted)
  for tenant, number in pairs(claimed) do
    if tonumber(number) ~= counted[tenant] then
      return false
    end
  end
  for tenant in pairs(counted) do
    if not claimed[tenant] then
      return false
    end
  end
  return true
end

-- Corrects the numbers of claimed jobs of the tenants: a client may have deleted the hash of a job. If many entries are
-- pending, this is done only if more jobs are claimed than entries are pending.
local function correct_shares(stream)
  local turns, _, shares = turn_keys(stream)
  local n_claimed, n_waiting, claimed = 0, 0, by_name(redis.call('HGETALL', shares))
  claimed['*turn'], claimed['*waiting'] = nil, nil
  for _, number in pairs(claimed) do
    n_claimed = n_claimed + number
  end
  local n_pending = pending_by_consumer(stream, group)
  if not next(claimed) or (n_pending > MAX_COMPARED and n_claimed <= n_pending) then
    return
  end
  local counted = count_claimed_jobs(stream)
  if are_equal(claimed, counted) then
    return
  end
  for tenant in pairs(claimed) do
    redis.call('HDEL', shares, tenant)
  end
  for tenant, number in pairs(counted) do
    redis.call('HSET', shares, tenant, number)
  end
  for _, tenant in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
    n_waiting = n_waiting + redis.call('ZCARD', turns .. ':' .. tenant)
    set_turn(turns, shares, tenant)
  end
  if n_waiting > 0 then
    redis.call('HSET', shares, '*waiting', n_waiting)
  end
end

local partition = parts_of(streams.interactive)

-- Gives a job that cannot be claimed an entry again. Returns whether the job has a new entry.
local function repair(job, id)
  local status, priority, entry, run_at_ms, tenant = fields_if_hash(job,
    'status', 'priority', 'entry', 'run_at_ms', 'tenant')
  if not is_open(status) then
    return false
  end
  if run_at_ms then -- it is not due and needs no entry
    return redis.pcall('ZADD', partition .. 'later', 'NX', whole_number(run_at_ms) or 0, id) == 1
  end
  local stream = streams[priority]
  if not stream then
    return false
  end
  entry = string.match(entry or '', '^%d+%-%d+$') -- nil: another client has damaged or deleted the field
  local found = entry and redis.pcall('XRANGE', stream, entry, entry) or {}
  if found.err then
    return false -- another client has overwritten the stream
  end
  if #found == 0 then
    redis.pcall('XACK', stream, group, entry or '')
    leave_turns(stream, tenant, entry)
    set_entry(job, add_entry(stream, id, tenant))
    return true
  end
  if redis.pcall('XPENDING', stream, group).err then
    return false
  end
  local _, entry_fields = unpack(found[1])
  if tenant_in(entry_fields) then
    if not has_lost_turn(stream, tenant, entry) then
      return false
    end
  elseif not was_dropped(stream, entry) then
    return false
  end
  redis.call('XCLAIM', stream, group, WAITING, 0, entry, 'IDLE', EXPIRED_IDLE_MS, 'FORCE', 'JUSTID')
  return true
end

local keys, owners = {}, {} -- events and idempotency records, and the hashes of their jobs

local function add_key(key, id)
  if type(id) == 'string' then
    keys[#keys + 1], owners[#owners + 1] = key, partition .. 'job:' .. id
  end
end

-- Deletes the keys of jobs that do not exist, if they have no expiry: another client has deleted the hashes of the jobs.
local function drop_orphans()
  if #keys == 0 or redis.call('EXISTS', unpack(owners)) == #keys then
    return
  end
  for place, key in ipairs(keys) do
    if redis.call('EXISTS', owners[place]) == 0 and redis.call('TTL', key) == -1 then
      redis.call('DEL', key)
    end
  end
end

-- Removes the consumers of workers that are not alive. A consumer with pending entries remains.
local function remove_dead_consumers(stream, alive)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  for _, list in ipairs(array_or_empty(consumers)) do
    local info = by_name(list)
    if info['pending'] == 0 and not alive[info['name']] and info['idle'] >= max_idle_ms then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, info['name'])
    end
  end
end

-- Renews the lease of an entry of a running job, if it would expire later than if its worker had renewed it just now. Each
-- worker stores its lease with the jobs that it claims.
local function shorten_lease(stream, entry, consumer, idle_ms)
  local id = job_id_in(fields_of_entry(stream, entry))
  local lease_ms = id and whole_number(fields_if_hash(job_key(stream, id), 'lease_ms'))
  if lease_ms and idle_ms < EXPIRED_IDLE_MS - lease_ms then
    renew_lease(stream, group, consumer, entry, lease_ms)
  end
end

local function shorten_leases(stream)
  local _, consumers = pending_by_consumer(stream, group)
  for _, pair in ipairs(consumers) do
    local consumer = unpack(pair)
    local pending = consumer ~= WAITING and redis.call('XPENDING', stream, group, '-', '+', MAX_PENDING, consumer) or {}
    for _, item in ipairs(pending) do
      local entry, _, idle_ms = unpack(item)
      for_one_job(shorten_lease, stream, entry, consumer, idle_ms)
    end
  end
end

local pattern = string.gsub(partition, '[%*%?%[%]\\]', '\\%0') .. '*'
local next_cursor, found = unpack(redis.call('SCAN', cursor or '0', 'MATCH', pattern, 'COUNT', count))
redis.call('HSET', state, 'cursor', next_cursor, 'next_ms', now + pause_ms)
local repaired = {}
for _, key in ipairs(found) do
  local kind, name = string.match(string.sub(key, #partition + 1), '^(%a+):(.*)$')
  if kind == 'job' and repair(key, name) then
    repaired[#repaired + 1] = name
  elseif kind == 'events' then
    add_key(key, name)
  elseif kind == 'key' then
    add_key(key, redis.pcall('GET', key))
  end
end
drop_orphans()

local alive = {[WAITING] = true}
for i = 5, #ARGV do
  alive[ARGV[i]] = true
end
for _, stream in pairs(streams) do
  if was_set_back then
    shorten_leases(stream)
  end
  correct_shares(stream)
  remove_dead_consumers(stream, alive)
end
return repaired
