-- Counts the waiting jobs, the running jobs, and the jobs that are not due, of one partition.
--
-- KEYS[1]   later    sorted set of the jobs that had no entry so far, by the time at which they are due
-- KEYS[2..] streams  job streams of the partition
-- ARGV[1]   group    consumer group of the job streams
-- ARGV[2]   tenants  number of tenants of each stream to count at most
--
-- Returns {waiting, running, delayed, mode, tenants}. Jobs that are due and have no entry yet wait. `mode` is 'paused',
-- 'draining' or 'open'. `tenants` is an array with {tenant, waiting, claimed} for each priority of a tenant that has a
-- waiting or claimed job; here a job waits until a worker has claimed it.

local later, group, max_tenants = KEYS[1], ARGV[1], tonumber(ARGV[2])
local waiting, running, tenants = redis.call('ZCOUNT', later, '-inf', now_ms()), 0, {}
local delayed = redis.call('ZCARD', later) - waiting

-- Appends to `tenants` the tenants of a job stream: those that wait, then those that have only claimed jobs.
local function count_tenants(stream)
  local turns, _, shares = turn_keys(stream)
  local claimed, n_left = {}, max_tenants
  for name, value in pairs(by_name(redis.call('HGETALL', shares))) do
    claimed[name] = tonumber(value)
  end
  claimed['*turn'], claimed['*waiting'] = nil, nil
  for _, tenant in ipairs(redis.call('ZRANGE', turns, 0, max_tenants - 1)) do
    tenants[#tenants + 1] = {tenant, redis.call('ZCARD', turns .. ':' .. tenant), claimed[tenant] or 0}
    claimed[tenant], n_left = nil, n_left - 1
  end
  for tenant, n_claimed in pairs(claimed) do
    if n_left > 0 then
      tenants[#tenants + 1], n_left = {tenant, 0, n_claimed}, n_left - 1
    end
  end
end

for i = 2, #KEYS do
  local stream = KEYS[i]
  local n_running = count_running(stream, group)
  waiting = waiting + redis.call('XLEN', stream) - n_running
  running = running + n_running
  if max_tenants > 0 then
    count_tenants(stream)
  end
end
local mode = redis.pcall('HGET', string.match(later, '^(.*:)later$') .. 'config', 'mode')
return {waiting, running, delayed, (mode == 'paused' or mode == 'draining') and mode or 'open', tenants}
