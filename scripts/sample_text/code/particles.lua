-- A fountain of particles: emitter, pool and a fixed time step.
local Pool = {}
Pool.__index = Pool

function Pool.new(size)
  local self = setmetatable({ free = {}, live = {}, size = size }, Pool)
  for i = 1, size do
    self.free[i] = { x = 0, y = 0, vx = 0, vy = 0, life = 0 }
  end
  return self
end

function Pool:take()
  local particle = table.remove(self.free)
  if particle then
    self.live[#self.live + 1] = particle
  end
  return particle
end

function Pool:sweep()
  -- Backwards, with the last moved into the gap: the order does not matter.
  for i = #self.live, 1, -1 do
    local particle = self.live[i]
    if particle.life <= 0 then
      self.free[#self.free + 1] = particle
      self.live[i] = self.live[#self.live]
      self.live[#self.live] = nil
    end
  end
end

local Emitter = { rate = 120, gravity = 90, spread = math.pi / 6, speed = 140 }
Emitter.__index = Emitter

function Emitter.new(x, y, options)
  local self = setmetatable({ x = x, y = y, owed = 0, pool = Pool.new(1000) }, Emitter)
  for key, value in pairs(options or {}) do
    self[key] = value
  end
  return self
end

function Emitter:spawn()
  local particle = self.pool:take()
  if not particle then
    return
  end
  local angle = -math.pi / 2 + (math.random() - 0.5) * self.spread
  local speed = self.speed * (0.8 + 0.4 * math.random())
  particle.x, particle.y = self.x, self.y
  particle.vx, particle.vy = math.cos(angle) * speed, math.sin(angle) * speed
  particle.life = 2 + math.random()
end

function Emitter:update(dt)
  self.owed = self.owed + self.rate * dt
  while self.owed >= 1 do
    self:spawn()
    self.owed = self.owed - 1
  end
  for _, particle in ipairs(self.pool.live) do
    particle.vy = particle.vy + self.gravity * dt
    particle.x = particle.x + particle.vx * dt
    particle.y = particle.y + particle.vy * dt
    particle.life = particle.life - dt
  end
  self.pool:sweep()
end

local fountain = Emitter.new(0, 0, { rate = 200 })
for frame = 1, 180 do
  fountain:update(1 / 60)
  if frame % 60 == 0 then
    print(("after %d s: %d particles"):format(frame / 60, #fountain.pool.live))
  end
end
